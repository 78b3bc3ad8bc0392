"""The results of an audit: checks, samples, power, verdict."""

from __future__ import annotations

import dataclasses
import json

from specjax.types import Json


@dataclasses.dataclass(frozen=True)
class Check:
    """One property, whether the decoder claims it, whether it holds, and the measurement."""

    name: str
    claimed: bool
    holds: bool
    detail: str
    label: str = ""  # the verdict if it holds with a reservation, such as "float noise"

    @property
    def verdict(self) -> str:
        if self.holds:
            return self.label or "pass"
        return "FAIL" if self.claimed else "inexact by design"


@dataclasses.dataclass(frozen=True)
class Distribution(Check):
    """A statistical check, with the smallest bias that it could detect."""

    samples: int = 0
    p_value: float = 1.0
    total_variation: float = 0.0  # measured in the cells of the test
    expected: float = 0.0  # the total variation that is expected by chance
    detectable: float = 1.0  # the least total variation that is found with probability `POWER`


POWER = 0.99
"""The probability with which the reported total variation would have been found."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of an audit; its `str` is a table."""

    subject: str
    checks: tuple[Check, ...]
    significance: float

    @property
    def passed(self) -> bool:
        """True if no claim is broken."""
        return all(check.holds or not check.claimed for check in self.checks)

    @property
    def failures(self) -> tuple[str, ...]:
        """The names of the broken claims."""
        return tuple(check.name for check in self.checks if check.claimed and not check.holds)

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """The statistical checks; the first one is of the settings that were asked for."""
        return tuple(check for check in self.checks if isinstance(check, Distribution))

    def __str__(self) -> str:
        named = max(len(check.name) for check in self.checks)
        width = max(len(check.verdict) for check in self.checks)
        lines = [
            f"  {check.name:<{named}}  {check.verdict:<{width}}  {check.detail}"
            for check in self.checks
        ]
        power = [
            f"  {check.name}: {check.samples} samples; a total variation of "
            f"{check.detectable:.3f} would have been found with probability {POWER}"
            for check in self.distributions
        ]
        if power:
            power.append(
                f"  a lossless decoder fails with a probability below {self.significance:g}"
            )
        end = "passed: no claim is broken" if self.passed else f"FAILED: {', '.join(self.failures)}"
        return "\n".join([self.subject, "", *lines, "", *power, f"  {end}"])

    def to_json(self) -> dict[str, Json]:
        """Returns all fields and verdicts, for `json.dumps`."""
        checks = [{**dataclasses.asdict(check), "verdict": check.verdict} for check in self.checks]
        return {
            "subject": self.subject,
            "passed": self.passed,
            "failures": list(self.failures),
            "significance": self.significance,
            "power": POWER,
            "checks": checks,
        }

    def write(self, path: str) -> None:
        """Writes `to_json` into the file `path`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=2)
            file.write("\n")
