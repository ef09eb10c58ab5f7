"""Tests of workers on two hosts: network namespaces of this machine, and a link between them that can be made bad."""
