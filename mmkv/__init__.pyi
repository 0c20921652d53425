"""The public names, once: mmkv/__init__.py loads each on first use."""

from . import hf as hf
from .api import Engine as Engine
from .calls.tools import Tool as Tool
from .calls.tools import ToolCall as ToolCall
from .engine.budget import Budget as Budget
from .engine.config import EngineConfig as EngineConfig
from .engine.errors import BudgetError as BudgetError
from .engine.errors import CapacityError as CapacityError
from .engine.errors import ContextError as ContextError
from .engine.errors import ForgottenError as ForgottenError
from .engine.errors import GateError as GateError
from .engine.errors import InputError as InputError
from .engine.errors import MmkvError as MmkvError
from .engine.errors import ModelError as ModelError
from .engine.errors import NotFiniteError as NotFiniteError
from .engine.errors import PolicyError as PolicyError
from .engine.errors import SessionError as SessionError
from .engine.model.families import Family as Family
from .engine.model.families import register_family as register_family
from .engine.policies import CacheView as CacheView
from .engine.policies import GlobalAllocation as GlobalAllocation
from .engine.policies import HeadAllocation as HeadAllocation
from .engine.policies import Needs as Needs
from .engine.policies import NewTokens as NewTokens
from .engine.policies import Parameter as Parameter
from .engine.policies import Policy as Policy
from .engine.policies import Preset as Preset
from .engine.policies import Scores as Scores
from .engine.policies import Shares as Shares
from .engine.policies import register_policy as register_policy
from .reply import Reply as Reply
from .resources import bundled_model as bundled_model
from .sampling import Sampling as Sampling
from .session import Session as Session
from .turn import Observed as Observed

__version__: str
