"""A make of inference server: vLLM, started as a step of the Slurm job that the run is in.

    [engine]
    kind = "my_engine:OnSlurm"
    python = "/home/me/vllm/bin/python"

Another server than vLLM or SGLang is a class with all methods of `stretto_servers.make.Make`.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.engine.config import EngineConfig
from stretto_servers.make import Launch
from stretto_servers.vllm import VllmServer


class OnSlurm(VllmServer):
    """One server; how it is spoken to, and what it can do, is as for vLLM."""

    @staticmethod
    def launch(config: EngineConfig, model: str, port: int) -> Launch:
        """How a server is started: by `srun`, with the processors that `engine.threads` asks for."""
        launch = VllmServer.launch(config, model, port)
        step = ("srun", "--ntasks=1", "--overlap", f"--cpus-per-task={config.threads}")
        return replace(launch, command=(*step, *launch.command))
