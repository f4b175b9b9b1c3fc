"""``minedraft doctor``: its flags, and how the findings are shown."""

import argparse
import os
import sys
from contextlib import redirect_stdout

import msgspec
from rich.console import Console
from rich.text import Text

from minedraft import transport
from minedraft.commands.common import Commands
from minedraft.config import ConfigError, Endpoint
from minedraft.doctor import Finding, Subject, examine

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "doctor", help="find out what may not work here, and what to do", allow_abbrev=False
    )
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="the model whose output you get")
    add("draft", nargs="?", metavar="DRAFT", help="the drafter's model")
    add("--drafter", metavar="ADDRESS", help="instead of it: a running `minedraft drafter`")
    add("--key-file", metavar="FILE", help="its key file, for a tcp:// address")
    add("--json", action="store_true", help="for machines: a list of findings")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    subject = _subject(options)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(file=sys.stdout)
    findings = []
    # vLLM and others write to stdout what is no finding.
    with redirect_stdout(sys.stderr):
        for finding in examine(subject):
            findings.append(finding)
            if not options.json:
                console.print(line(finding), soft_wrap=True)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())  # noqa: T201
    return int(any(finding.state == "problem" for finding in findings))


def _subject(options: argparse.Namespace) -> Subject:
    if options.engine_flags:
        raise ConfigError(f"doctor does not know {' '.join(options.engine_flags)}")
    if options.drafter is None:
        if options.key_file is not None:
            raise ConfigError("a key file is for a drafter that runs elsewhere; leave it out")
        return Subject(options.target, options.draft)
    if options.target is None or options.draft is not None:
        raise ConfigError("with --drafter give the target, and no draft model")
    endpoint = Endpoint(transport.check_address(options.drafter), options.key_file)
    return Subject(options.target, drafter=endpoint)


def line(finding: Finding) -> Text:
    """The finding for people, with what to do on a line of its own."""
    state, name = f"{finding.state:8}", f"{finding.check.replace('_', ' '):16}"
    text = Text.assemble((state, STYLES[finding.state]), (name, "bold"), finding.found)
    if finding.advice:
        text.append(f"\n{'':24}{finding.advice}", "italic")
    return text
