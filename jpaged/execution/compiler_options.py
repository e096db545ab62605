"""What XLA is told beside a program's text."""

from jpaged.target import Target

# By default a step of several cards is cut into graphs at every collective.
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES"


def compiler_options(target: Target) -> dict[str, str | bool]:
    """Return options of XLA for all programs on these devices.

    On several NVIDIA cards the whole step is one command buffer (a CUDA graph), so the host
    launches it at once.
    """
    if target.compute_capability is None or target.num_devices == 1:
        return {}
    return {"xla_gpu_enable_command_buffer": COMMANDS}
