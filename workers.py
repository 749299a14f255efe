"""Environments in processes of their own, for simulators that are slow, crash, or hang.

    envs = remote_envs("Navigation", 8, processes=2, split="train")   # the same calls as any env

A process holds every `processes`-th environment and plays one call at a time; calls into different
processes run side by side if they come from different threads. A process that dies, or does not
answer within `limit` seconds, is killed, and the call raises `WorkerLost`. The next call starts a
new process; episodes that were under way in the old one then raise as well ("call reset() first"),
so that each of them can be counted and dropped, and no episode goes on from nowhere.
"""

import atexit
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from envs import env_class

START_LIMIT = 120.0  # s until a new process must have answered: imports and renderers take a while


class WorkerLost(RuntimeError):
    """The process of an environment died or hung; its episode is lost, the environment is not."""


def serve(pipe: Connection, module: str, name: str, options: dict) -> None:
    """A process: answer (env index, attribute, args, kwargs) until the pipe ends."""
    envs, world = {}, getattr(import_module(module), name)
    pipe.send((None, "ready"))
    while True:
        try:
            index, attribute, args, kwargs = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            if index not in envs:
                envs[index] = world(**options)
            value = getattr(envs[index], attribute)
            pipe.send((None, value(*args, **kwargs) if callable(value) else value))
        except Exception as fault:  # whatever it is, the parent has to know it
            pipe.send((f"{type(fault).__name__}: {fault}", None))


class Worker:
    """A process with some of the environments; started when it is first called."""

    def __init__(self, name: str, options: dict, limit: float):
        self.name, self.options, self.limit = name, options, limit
        self.process, self.pipe, self.lock = None, None, threading.Lock()
        atexit.register(self.close)  # an idle one would see the pipe end, one that hangs would not

    def call(self, index: int, attribute: str, *args, **kwargs):
        """What the environment's method returns, or its attribute. RuntimeError: what it raised;
        WorkerLost: the process died or hung."""
        with self.lock:
            try:
                if self.process is None:
                    self._start()
                self.pipe.send((index, attribute, args, kwargs))
                error, value = self._answer(self.limit)
            except (EOFError, OSError) as fault:
                code = self.close()
                raise WorkerLost(f"the process of {self.name} died (exit code {code}); it is "
                                 "started again for the next call") from fault
        if error:
            raise RuntimeError(error)
        return value

    def _start(self):
        """A new interpreter: multiprocessing would fork a renderer, or import the main script."""
        self.pipe, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno()), env_class(self.name).__module__,
                   self.name, json.dumps(self.options)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()  # so that its death ends the pipe
        self._answer(START_LIMIT)

    def _answer(self, limit: float):
        if not self.pipe.poll(limit):
            self.close()
            raise WorkerLost(f"the process of {self.name} did not answer within {limit:g} s and "
                             "was killed; it is started again for the next call")
        return self.pipe.recv()

    def close(self) -> int | None:
        """End the process; the next call starts another one. Returns its exit code, if it had one
        (the pipe may end a moment before the process has)."""
        if self.process is None:
            return None
        self.pipe.close()
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        return code


class RemoteEnv:
    """One environment in a worker, with the calls that training makes."""

    def __init__(self, worker: Worker, index: int):
        self.worker, self.index = worker, index

    def reset(self, *, seed: int):
        return self.worker.call(self.index, "reset", seed=seed)

    def step(self, reply: str):
        return self.worker.call(self.index, "step", reply)

    def expert_reply(self, noise: float = 0.0) -> str:
        return self.worker.call(self.index, "expert_reply", noise)

    @property
    def system_prompt(self) -> str:
        return self.worker.call(self.index, "system_prompt")


def side_by_side(function, envs: list, indices) -> list:
    """[function(i) for i in indices], a thread for each worker of `envs`; in order, one after the
    other, where the environments live in this process: its simulators want a single thread."""
    workers = {env.worker for env in envs if isinstance(env, RemoteEnv)}
    if not workers:
        return list(map(function, indices))
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(function, indices))


def remote_envs(name: str, count: int, *, processes: int, limit: float = 60.0,
                **options) -> list[RemoteEnv]:
    """`count` environments of `envs.make_env(name, **options)`, spread over so many processes."""
    workers = [Worker(name, options, limit) for _ in range(min(processes, count))]
    return [RemoteEnv(workers[i % len(workers)], i) for i in range(count)]


if __name__ == "__main__":  # a worker, as Worker._start calls it
    serve(Connection(int(sys.argv[1])), *sys.argv[2:4], json.loads(sys.argv[4]))
