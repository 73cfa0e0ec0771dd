"""A worker that trains nothing: it writes what a run would have written, scored by a known function of its settings."""

import sys

WORKER = """
import json, math, os, pathlib, signal, sys, time
behaviour, speed = json.loads(os.environ["BEHAVIOUR"]), float(os.environ.get("TRIAL_SECONDS", 0.0))

def text(value):
    if isinstance(value, dict):
        return None
    return repr(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else json.dumps(value)

def train(settings):
    folder = pathlib.Path(settings["runs"], settings["name"])
    folder.mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000000000001.pt").write_text("weights")
    lines = [f"{name} = {text(value)}" for name, value in settings.items() if text(value) is not None]
    (folder / "config.toml").write_text(chr(10).join(lines))
    with open(pathlib.Path(settings["runs"], "starts"), "a") as file:
        file.write(settings["name"] + chr(10))
    does = behaviour.get(settings["name"], "finish")
    if does == "crash":
        raise ValueError("it broke")
    if does == "full":
        sys.exit("hurtle: error: metrics.jsonl could not be written: No space left on device.")
    if does == "refuse":
        print("hurtle: error: gamma does not fit", file=sys.stderr)
        sys.exit(2)
    if does == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)
    if does == "grow":
        kept = bytearray(os.urandom(1)) * 500_000_000
        time.sleep(60)
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    far = math.log(settings["learning_rate"] / 0.003) ** 2 + 10 * (settings["gamma"] - 0.98) ** 2
    steps = settings["total_steps"]
    score = 100.0 - 10.0 * far - 20.0 * math.exp(-steps / 20_000) + 0.5 * math.sin(settings["seed"] * 1.7)
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append("Ctrl-C"))
    if does == "wait":
        (folder / "waits").touch()
        while not stopped:
            time.sleep(0.01)
    points, done = 10, 0
    with open(folder / "metrics.jsonl", "w") as file:
        for k in range(1, points + 1):
            if stopped:
                break
            done = steps * k // points
            line = {"step": done, "steps": done, "seconds": done / 10_000, "episode_return": score * k / points}
            file.write(json.dumps(line) + chr(10))
            file.flush()
            time.sleep(speed / points)
    ends = {"steps": done, "seconds": done / 10_000, "steps_per_second": 1e4, "mean_return": score * done / steps}
    if stopped and done < steps:
        ends["stopped_by"] = stopped[0]
    else:
        mean = float("nan") if does == "nan" else score
        ends |= {"stopped_by": "total_steps", "evaluation": {"mean": mean}, "mean_return": mean}
        if does == "nan":
            ends["evaluation"], ends["mean_return"] = {"mean": None}, None
            (folder / "metrics.jsonl").write_text("")
    (folder / "summary.json").write_text(json.dumps(ends))

for line in sys.stdin:
    words = json.loads(line)
    log = open(words["log"], "a")
    os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    train(words["settings"])
    print("done", flush=True)
"""
COMMAND = (sys.executable, "-I", "-S", "-c", WORKER)
SPACE = """
total_steps = { low = 2000, high = 100_000, scale = "log" }
learning_rate = { low = 1e-5, high = 1.0, scale = "log" }
gamma = { low = 0.8, high = 0.999, scale = "near_one" }
"""
