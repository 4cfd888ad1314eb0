"""The file of tenants: what it may hold, and how what is wrong with it is told."""

import pytest

from penstock.clients.host.reloaded_files import FileError, NamedFile
from penstock.scheduler.config import TenantLimits
from penstock.service.auth.operator_files import OperatorFiles
from penstock.service.auth.tenant_limits import TENANTS_FLAG, TenantLimitsFile, parse_tenants
from penstock.service.config.command_line import parse_config


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "tenants.yaml"

    def load(text):
        return parse_tenants(NamedFile(TENANTS_FLAG, path), text.encode())

    return load


def test_a_key_for_each_tenant_and_one_for_all_others(load):
    tenants = load(
        "# the rest\ndefault: {max-live-requests: 200}\n"
        "acme:\n  weight: 2.5\n  max_prompt_tokens: 8000\n  max-tokens: 1_000\n"
        "zenith: {requests-per-second: 0.5, tokens-per-minute: 100_000}\n"
    )
    acme = TenantLimits(2.5, max_prompt_tokens=8000, max_tokens=1000)
    zenith = TenantLimits(requests_per_second=0.5, tokens_per_minute=100_000)
    assert tenants == TenantLimitsFile(TenantLimits(max_live_requests=200), {"acme": acme, "zenith": zenith})


@pytest.mark.parametrize("text", ["{}", "# no limits\n{}\n"])
def test_an_empty_mapping_changes_nothing(load, text):
    assert load(text) == TenantLimitsFile()


def test_names_are_text_whatever_yaml_would_take_them_for(load):
    names = ["no", "007", "1.50", "null", "2026-11-20", "a.b-c_D"]
    tenants = load("".join(f"{name}: {{weight: 2}}\n" for name in names) + "bare:\n")
    assert list(tenants.named) == [*names, "bare"]
    assert tenants.named["007"].weight == 2
    assert tenants.named["bare"] == TenantLimits()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; write {} for no limits"),  # or not written yet
        ("# nothing\n", "is empty; write {} for no limits"),
        ("a: b: c", "is not valid YAML"),
        ("- acme", "must contain keys and values, such as weight: 2"),
        ("acme: 3", "acme: must contain keys and values, such as weight: 2"),
        ("[a]: {}", "must have names as keys"),
        ("a/b: {}", "'a/b': is not a valid tenant name; use 1 to 64 characters of [A-Za-z0-9_.-]"),
        (f"{'a' * 65}: {{}}", "is not a valid tenant name"),
        (
            "acme: {wait: 2}",
            "acme: wait: is not a key; there are weight, max-prompt-tokens, max-tokens, max-live-requests, requests-",
        ),
        ("acme: {weight: 0}", "acme: weight: must be 0.001 to 1,000; it is 0"),
        ("acme: {weight: .nan}", "acme: weight: must be a number of 0.001 to 1,000; it is '.nan'"),
        ("acme: {weight: nan}", "acme: weight: must be 0.001 to 1,000; it is nan"),
        ("acme: {weight: heavy}", "acme: weight: must be a number of 0.001 to 1,000; it is 'heavy'"),
        ("acme: {max-tokens: 1.5}", "acme: max-tokens: must be a whole number of 1 to 16,777,216; it is '1.5'"),
        ("acme: {max-tokens: }", "acme: max-tokens: must be a whole number of 1 to 16,777,216; it is 'none'"),
        ("acme: {max-tokens: [1]}", "acme: max-tokens: must be a whole number"),
        ("acme: {requests-per-second: 0}", "acme: requests-per-second: must be 0.001 to 1,000,000"),
        ("acme: {tokens-per-minute: 0}", "acme: tokens-per-minute: must be 1 to 1,099,511,627,776; it is 0"),
        ("acme: {max-live-requests: 0}", "acme: max-live-requests: must be 1 to 1,048,576; it is 0"),
        ("default: {max-prompt-tokens: -1}", "default: max-prompt-tokens: must be 1 to 16,777,216; it is -1"),
        ("acme: {weight: 1, weight: 2}", "acme: weight: occurs twice; remove one of them"),
        ("acme: {}\nacme: {}", "acme: occurs twice"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_tenant_and_key(load, text, problem, tmp_path):
    with pytest.raises(FileError) as error:
        load(text)
    assert str(error.value).startswith(f"--tenants-file {tmp_path}/tenants.yaml: ")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_too_many_tenants(load):
    with pytest.raises(FileError, match=r"names 16,385 tenants; at most 16,384 are possible"):
        load("".join(f"t{number}:\n" for number in range(16_385)))


def test_a_file_that_is_no_text(tmp_path):
    file = NamedFile(TENANTS_FLAG, tmp_path / "bytes")
    with pytest.raises(FileError, match="bytes: is not UTF-8 text"):
        parse_tenants(file, b"\xff\xfe\xff")


def test_a_service_does_not_start_with_an_empty_file(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.touch()
    with pytest.raises(FileError, match=r"--tenants-file .*tenants\.yaml: is empty; write \{\} for no limits"):
        OperatorFiles.load(parse_config([f"--tenants-file={path}"]))


def test_the_adapters_that_a_tenant_may_use(load):
    tenants = load("default: {adapters: [a]}\nacme: {weight: 2, adapters: [a, b/c]}\nzenith: {adapters: []}\nbare:\n")
    assert tenants.adapters_of("acme") == {"a", "b/c"}
    assert tenants.adapters_of("zenith") == frozenset()
    assert tenants.adapters_of("bare") is None, "all"
    assert tenants.adapters_of("anyone else") == {"a"}
    assert load("acme: {adapters: [a]}").adapters_of("anyone else") is None


@pytest.mark.parametrize("value", ["a", "{a: b}", "[[a]]", "[a, '']", "null"])
def test_adapters_that_are_no_list_of_names(load, value):
    with pytest.raises(FileError, match="acme: adapters: must be a list of names"):
        load(f"acme: {{adapters: {value}}}")
