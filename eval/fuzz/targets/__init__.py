"""The classes of inputs."""

from mmkv.eval.fuzz.target import Target
from mmkv.eval.fuzz.targets.api import ChangedWeights, ForeignErrors, PythonApi
from mmkv.eval.fuzz.targets.command_line import CommandLine, Interrupts
from mmkv.eval.fuzz.targets.contents import Benchmark, Pictures, Templates, TrainingRows
from mmkv.eval.fuzz.targets.http import Heads, HttpBodies, SocketMessages, StoreFaults
from mmkv.eval.fuzz.targets.model_files import Checkpoints, GateFiles, SessionFileInputs
from mmkv.eval.fuzz.targets.tools import CutStreams, ToolBodies

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        CommandLine,
        Pictures,
        SessionFileInputs,
        GateFiles,
        Checkpoints,
        Templates,
        Benchmark,
        TrainingRows,
        PythonApi,
        HttpBodies,
        Interrupts,
        ForeignErrors,
        ChangedWeights,
        Heads,
        StoreFaults,
        ToolBodies,
        CutStreams,
        SocketMessages,
    )
}
