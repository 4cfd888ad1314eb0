"""The messages of SentencePiece's ``sentencepiece_model.proto``, with the fields that penstock reads."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_INT, _BOOL, _FLOAT, _BYTES = _Field.TYPE_INT32, _Field.TYPE_BOOL, _Field.TYPE_FLOAT, _Field.TYPE_BYTES
_FIELDS = {
    "SentencePiece": {
        "piece": (1, _BYTES, ""),
        "score": (2, _FLOAT, "0"),
        "type": (3, _INT, "1"),
    },
    "TrainerSpec": {
        "model_type": (3, _INT, "1"),
        "treat_whitespace_as_suffix": (24, _BOOL, "false"),
        "byte_fallback": (35, _BOOL, "false"),
        "unk_piece": (45, _BYTES, "<unk>"),
        "bos_piece": (46, _BYTES, "<s>"),
        "eos_piece": (47, _BYTES, "</s>"),
        "pad_piece": (48, _BYTES, "<pad>"),
    },
    "NormalizerSpec": {
        "name": (1, _BYTES, ""),
        "precompiled_charsmap": (2, _BYTES, ""),
        "add_dummy_prefix": (3, _BOOL, "true"),
        "remove_extra_whitespaces": (4, _BOOL, "true"),
        "escape_whitespaces": (5, _BOOL, "true"),
    },
}
"""The fields of each message, with their numbers, types and defaults. Texts are bytes, since they may be invalid."""
_MESSAGES = {
    "pieces": (1, "SentencePiece", _Field.LABEL_REPEATED),
    "trainer_spec": (2, "TrainerSpec", _Field.LABEL_OPTIONAL),
    "normalizer_spec": (3, "NormalizerSpec", _Field.LABEL_OPTIONAL),
}
"""The messages in a model."""


def parse_model(content: bytes) -> Any:
    """Returns the ``ModelProto`` in a file. Raises google.protobuf.message.DecodeError."""
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece_model.proto", package="penstock", syntax="proto2")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, default) in fields.items():
            described.field.add(name=name, number=number, type=kind, label=_Field.LABEL_OPTIONAL, default_value=default)
    described = file.message_type.add(name="ModelProto")
    for name, (number, message, label) in _MESSAGES.items():
        described.field.add(
            name=name, number=number, type=_Field.TYPE_MESSAGE, type_name=f".penstock.{message}", label=label
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    model = message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.ModelProto"))()
    model.ParseFromString(content)
    return model
