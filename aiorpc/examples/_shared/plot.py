"""The figures of batch_rl, of one run and of a sweep, and of actor_learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .program import figure

BATCHED, UNBATCHED = "#1f6fb4", "#c9602c"


def draw_training(result: dict[str, Any], path: Path) -> None:
    """Draw a run's reward and steps/s over its episodes into a PNG file at ``path``. result: as ``run`` returns it."""
    episodes = range(1, len(result["rewards"]) + 1)
    steps = result["observers"] * result["num_steps"]
    how = "batched" if result["batch"] else "unbatched"
    with figure(path, 7.0, 5.0, grid=True) as page:
        reward, speed = page.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        reward.plot(episodes, result["rewards"], color=BATCHED, marker="o", markersize=3, linewidth=1, label="episode")
        reward.plot(episodes, result["running_rewards"], color=UNBATCHED, linewidth=2, label="running reward")
        reward.set(ylabel="reward (mean of the games)")
        reward.legend(frameon=False, loc="upper left")
        speed.plot(episodes, [steps / seconds for seconds in result["seconds"]], color="0.35", linewidth=1)
        speed.set(xlabel="episode", ylabel="steps/s")
        reward.set_title(f"batch_rl on CartPole-v1: an agent, {result['observers']} observers, {how}", fontsize=10)
        for axes in (reward, speed):
            axes.set_ylim(bottom=0)


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw steps/s over the number of observers, batched and unbatched, into a PNG file at ``path``."""
    observers = [row["observers"] for row in data["rows"]]
    with figure(path, 7.0, 4.2, grid=True) as page:
        axes = page.add_subplot()
        for name, color, marker in (("batched", BATCHED, "o"), ("unbatched", UNBATCHED, "s")):
            speeds = [row[name]["median_steps_per_s"] for row in data["rows"]]
            axes.plot(observers, speeds, color=color, marker=marker, markersize=5, label=name)
            axes.annotate(name, (observers[-1], speeds[-1]), xytext=(8, -3), textcoords="offset points", color=color)
        if data["batched_wins_from"] is not None:
            axes.axvline(data["batched_wins_from"], color="0.6", linewidth=1, linestyle=":")
            axes.annotate(
                f"batches win\nfrom here on ({data['batched_wins_from']})",
                (data["batched_wins_from"], 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(4, 2),
                textcoords="offset points",
                color="0.35",
                fontsize=8,
            )
        axes.set(xlabel="observers", ylabel="environment steps per second", xticks=observers)
        axes.set_xlim(observers[0] - 0.3, observers[-1] + 1.4)
        axes.set_ylim(bottom=0)
        axes.set_title(f"batch_rl on CartPole-v1 ({data['machine']})", fontsize=10)


def draw_actor_learner(result: dict[str, Any], path: Path) -> None:
    """Draw reward, speed and age of weights over the seconds of a run; a line where an actor was killed."""
    seconds = result["seconds"]
    with figure(path, 7.0, 6.0, grid=True) as page:
        reward, speed, age = page.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
        reward.plot(seconds, result["rewards"], color=BATCHED, linewidth=2)
        reward.axhline(result["solved"], color="0.6", linewidth=1, linestyle=":")
        reward.set(ylabel="reward (mean of 100 games)")
        speed.plot(seconds, result["rates"], color="0.35", linewidth=1)
        speed.set(ylabel="samples/s")
        age.plot(seconds, result["ages"], color=UNBATCHED, linewidth=1)
        age.set(xlabel="seconds", ylabel="age of the weights\n(updates)")
        for axes in (reward, speed, age):
            axes.set_ylim(bottom=0)
            for at in result["kills"]:
                axes.axvline(at, color="#b3261e", linewidth=0.8, linestyle="--")
        killed = f", {len(result['kills'])} killed and replaced (dashed)" if result["kills"] else ""
        reward.set_title(f"actor_learner on CartPole-v1: {result['actors']} actors{killed}", fontsize=10)
