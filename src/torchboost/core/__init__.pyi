from .algorithm import Algorithm as Algorithm
from .algorithm import AttachedAlgorithms as AttachedAlgorithms
from .algorithm import Attachment as Attachment
from .algorithm import Target as Target
from .algorithm import Traits as Traits
from .algorithm import attach_all as attach_all
