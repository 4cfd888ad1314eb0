"""The contract as generated stubs, with the messages and enums of all its files. `make protos` writes the stubs; do not
edit them."""

# ruff: noqa: F403
from penstock.v1.admin_pb2 import *
from penstock.v1.classification_pb2 import *
from penstock.v1.constraint_pb2 import *
from penstock.v1.embedding_pb2 import *
from penstock.v1.error_pb2 import *
from penstock.v1.generation_pb2 import *
from penstock.v1.generation_request_pb2 import *
from penstock.v1.kv_event_pb2 import *
from penstock.v1.live_request_pb2 import *
from penstock.v1.model_pb2 import *
from penstock.v1.output_pb2 import *
from penstock.v1.prompt_pb2 import *
from penstock.v1.resumption_pb2 import *
from penstock.v1.sampling_pb2 import *
from penstock.v1.settings_pb2 import *
from penstock.v1.state_pb2 import *
from penstock.v1.stats_pb2 import *
from penstock.v1.tokenizer_pb2 import *

del DESCRIPTOR  # noqa: F821 - each file has its own
