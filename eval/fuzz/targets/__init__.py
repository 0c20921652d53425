"""The classes of inputs."""

from mmkv.eval.fuzz.target import Target
from mmkv.eval.fuzz.targets.api import PythonApi
from mmkv.eval.fuzz.targets.checkpoints import Checkpoints
from mmkv.eval.fuzz.targets.command_line import CommandLine
from mmkv.eval.fuzz.targets.dialogues import Benchmark, TrainingRows
from mmkv.eval.fuzz.targets.faults import Heads, StoreFaults
from mmkv.eval.fuzz.targets.foreign import ChangedWeights, ForeignErrors
from mmkv.eval.fuzz.targets.gates import GateFiles
from mmkv.eval.fuzz.targets.http import HttpBodies
from mmkv.eval.fuzz.targets.interrupts import Interrupts
from mmkv.eval.fuzz.targets.pictures import Pictures
from mmkv.eval.fuzz.targets.session_files import SessionFiles
from mmkv.eval.fuzz.targets.templates import Templates

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        CommandLine,
        Pictures,
        SessionFiles,
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
    )
}
