"""The types that all other packages share, in the words of docs/architecture.md."""

from semspec.events import DraftedStep as DraftedStep
from semspec.events import Event as Event
from semspec.events import FinishReason as FinishReason
from semspec.events import Origin as Origin
from semspec.events import Relaxed as Relaxed
from semspec.events import StepOutcome as StepOutcome
from semspec.events import TokenLogprob as TokenLogprob
from semspec.types.drafter import Drafter as Drafter
from semspec.types.drafter import DraftRequest as DraftRequest
from semspec.types.outputs import DecodeOutput as DecodeOutput
from semspec.types.outputs import Draft as Draft
from semspec.types.outputs import DraftSteps as DraftSteps
from semspec.types.outputs import ScoreOutput as ScoreOutput
from semspec.types.outputs import Verdict as Verdict
from semspec.types.requests import Acquire as Acquire
from semspec.types.requests import Decode as Decode
from semspec.types.requests import Grow as Grow
from semspec.types.requests import ProposalGenerator as ProposalGenerator
from semspec.types.requests import Request as Request
from semspec.types.requests import Runner as Runner
from semspec.types.requests import Score as Score
from semspec.types.requests import SequenceGenerator as SequenceGenerator
from semspec.types.requests import VerifyRequest as VerifyRequest
from semspec.types.sampling import COLDEST as COLDEST
from semspec.types.sampling import GREEDY as GREEDY
from semspec.types.sampling import Sampling as Sampling
