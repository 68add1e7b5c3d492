"""An inference server: vLLM, started as a step of the Slurm job in which the run is.

    [engine]
    kind = "my_engine:OnSlurm"
    python = "/home/me/vllm/bin/python"

A server other than vLLM or SGLang is a class with all methods of `stretto_servers.make.Make`.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.engine.config import EngineConfig
from stretto_servers.make import Launch
from stretto_servers.vllm import VllmServer


class OnSlurm(VllmServer):
    """One server, with the interface and the capabilities of vLLM."""

    @staticmethod
    def launch(config: EngineConfig, model: str, port: int) -> Launch:
        """Command that starts the server: by `srun`, with `engine.threads` CPU cores."""
        launch = VllmServer.launch(config, model, port)
        step = ("srun", "--ntasks=1", "--overlap", f"--cpus-per-task={config.threads}")
        return replace(launch, command=(*step, *launch.command))
