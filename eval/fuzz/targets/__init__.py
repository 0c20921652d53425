"""The classes of inputs."""

from eval.fuzz.target import Target
from eval.fuzz.targets.api import PythonApi
from eval.fuzz.targets.checkpoints import Checkpoints
from eval.fuzz.targets.command_line import CommandLine
from eval.fuzz.targets.dialogues import Benchmark, TrainingRows
from eval.fuzz.targets.faults import Heads, StoreFaults
from eval.fuzz.targets.foreign import ChangedWeights, ForeignErrors
from eval.fuzz.targets.gates import GateFiles
from eval.fuzz.targets.http import HttpBodies
from eval.fuzz.targets.interrupts import Interrupts
from eval.fuzz.targets.pictures import Pictures
from eval.fuzz.targets.session_files import SessionFiles
from eval.fuzz.targets.templates import Templates

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
