"""What was measured between ranks, and what it means for a run."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.advice.findings import Finding, by_rank, spell_ranks
from thinwire.advice.measurements import Measurements
from thinwire.comm.reach import Unreached
from thinwire.common.formats import format_rate, format_seconds
from thinwire.run.network import LinkReport

EXAMPLE_BITS = 32 * 10_000_000  # gradients of 10 million parameters
ENOUGH_MBIT = 10_000  # above this rate, times on a machine differ more than links do
ASYMMETRIC, UNEVEN = 2.0, 2.0  # times as fast one way; times as fast as the slowest rank
LOSSY = 0.01  # share of segments that were sent again
FAR_MS = 20.0  # a latency at which small messages cost more than large ones
CLOCK_SECONDS, CLOCK_NOTE_SECONDS = 60.0, 0.5
MOST_NAMED = 5


def reach_finding(unreached: Sequence[Unreached], num_nodes: int) -> Finding:
    """Whether ranks can connect with each other, besides with the store."""
    if not unreached:
        return Finding("ok", "connections", "every rank that was tried reaches the others")
    some = "; ".join(
        f"rank {one.source} → rank {one.to} at {one.address} port {one.port}: {one.reason}"
        for one in unreached[:MOST_NAMED]
    )
    more = f"; and {len(unreached) - MOST_NAMED} more" if len(unreached) > MOST_NAMED else ""
    return Finding(
        "failure", "connections", f"{some}{more}",
        "Ranks reach the store, but not each other. Ranks that join would wait for minutes and then fail.",
        "Allow all TCP ports between these addresses in the firewall (ranks listen at free ports), or give addresses "
        "of a network without one, by MASTER_ADDR and --iface." if num_nodes > 1 else
        "Ranks of one machine use its own address: check its firewall, and --iface.",
    )  # fmt: skip


def wire_findings(found: Measurements, asked: LinkReport, link: str | None) -> list[Finding]:
    """All that follows from the measurements. `link` is the one that was asked for by --link, if any."""
    if found.ring is None:
        return [compute(found)]
    several = len(set(found.nodes)) > 1
    about_links = [*asymmetric(found), *lossy(found)] if several else []
    return [*shaped(asked, link), *rates(found), *latency(found), *about_links, clocks(found), compute(found)]


def shaped(asked: LinkReport, link: str | None) -> list[Finding]:
    """Whether the link is the one that was asked for."""
    if asked.state == "not shaped":
        return [
            Finding(
                "failure", "link", f"--link {link} could not be made",
                "A run with --strict would fail; without, it would run at this machine's own speed.",
                "The message of netlab, above, says what is missing.",
            )
        ]  # fmt: skip
    if asked.state == "off" and asked.rate_mbit is not None:
        return [
            Finding(
                "warning", "link", f"--link {link}, but {format_rate(asked.rate_mbit)} Mbit/s",
                "The machine is too busy or too slow for this link. A run with --strict would fail.",
                "End other programs, or try a slower link.",
            )
        ]  # fmt: skip
    return []


def rates(found: Measurements) -> list[Finding]:
    """The slowest and the fastest pair, and the ring."""
    assert found.ring is not None
    known = [link.rate_mbit for row in found.links for link in row if link]
    num_links = len(found.probed) * (len(found.probed) - 1)
    between = "nodes" if len(set(found.nodes)) > 1 else "ranks"
    value = f"{_spread(known)} between pairs of {between}; {format_rate(found.ring.rate_mbit)} Mbit/s around the ring"
    if len(found.probed) < len(found.firsts):
        value += f"; {len(found.probed)} of {len(found.firsts)} {between} were measured"
    if len(known) < num_links:
        value += f"; for {num_links - len(known)} of {num_links} links there was no time left"
    size = len(found.nodes)
    seconds = 2 * (size - 1) / size * EXAMPLE_BITS / found.ring.rate_mbit / 1e6
    meaning = f"Each exchange of gradients of 10 million parameters takes {format_seconds(seconds)} at least."
    if found.ring.rate_mbit >= ENOUGH_MBIT or between == "ranks":
        return [Finding("ok", "rate", value, meaning)]
    return [
        Finding(
            "note", "rate", value, meaning,
            "If a step computes for less than that, send less: data_parallel(reducer=maxnorm(bits=4)) sends an eighth, "
            "diloco still less.",
        )
    ]  # fmt: skip


def latency(found: Measurements) -> list[Finding]:
    """How long small messages take."""
    assert found.ring is not None
    known = [link.latency_ms for row in found.links for link in row if link]
    longest = max([*known, found.ring.latency_ms])
    value = f"{longest:.3g} ms one way at most"
    if longest < FAR_MS:
        return [Finding("ok", "latency", value)]
    steps = 2 * (len(found.nodes) - 1)
    return [
        Finding(
            "note", "latency", value,
            f"A ring all-reduce of {len(found.nodes)} ranks waits for it {steps} times, however little is sent.",
            "Exchange less often: local_sgd, or diloco, which sends while it trains. Larger buckets help too.",
        )
    ]  # fmt: skip


def asymmetric(found: Measurements) -> list[Finding]:
    """Pairs that send much faster one way than the other."""
    odd = []
    for i, a in enumerate(found.probed):
        for j, b in enumerate(found.probed[:i]):
            there, back = found.links[i][j], found.links[j][i]
            if there is None or back is None:
                continue
            (slow, way), (fast, _) = sorted([(there.rate_mbit, (a, b)), (back.rate_mbit, (b, a))])
            if fast > ASYMMETRIC * slow and slow < ENOUGH_MBIT:
                words = f"rank {way[0]} → rank {way[1]} {format_rate(slow)} Mbit/s, back {format_rate(fast)} Mbit/s"
                odd.append((slow / fast, words))
    if not odd:
        return []
    return [
        Finding(
            "warning", "asymmetric links", "; ".join(words for _, words in sorted(odd)[:MOST_NAMED]),
            "All ranks wait for the slow direction: in a ring, each sends as much as it receives.",
            "Look for an uplink that is slower than its downlink, half-duplex Ethernet, or traffic of others.",
        )
    ]  # fmt: skip


def lossy(found: Measurements) -> list[Finding]:
    """Hosts whose segments were lost on the way."""
    shares = [again / max(1, sent) for sent, again in zip(found.segments, found.retransmitted, strict=True)]
    bad = [rank for rank, share in enumerate(shares) if share > LOSSY]
    if not bad:
        return [Finding("ok", "lost segments", f"{100 * max(shares):.2g} % at most were sent again")]
    return [
        Finding(
            "warning", "lost segments", by_rank([f"{100 * share:.2g} % sent again" for share in shares]),
            f"TCP on the hosts of {spell_ranks(bad)} sends more than a hundredth again, and slows down each time.",
            "Check cables, wireless links and duplex settings, and whether others fill the link.",
        )
    ]  # fmt: skip


def clocks(found: Measurements) -> Finding:
    """Whether times of different machines can be compared."""
    widest = max(found.clocks) - min(found.clocks)
    value = f"{format_seconds(widest)} apart at most"
    if widest < CLOCK_NOTE_SECONDS:
        return Finding("ok", "clocks", value)
    rank = max(zip(found.clocks, found.firsts, strict=True), key=lambda one: abs(one[0]))[1]
    return Finding(
        "warning" if widest > CLOCK_SECONDS else "note", "clocks", f"{value} (rank {rank} from rank 0)",
        "Training does not need clocks, but times in logs and in timeline.jsonl cannot be compared between machines.",
        "Let the machines set their clocks by NTP, as with chrony or systemd-timesyncd.",
    )  # fmt: skip


def compute(found: Measurements) -> Finding:
    """How fast ranks compute, and whether one is much slower than the others."""
    slowest, fastest = min(found.compute), max(found.compute)
    low, high = f"{slowest:.3g}", f"{fastest:.3g}"
    value = f"{low} Gflop/s a rank" if low == high else f"{low} to {high} Gflop/s a rank"
    if fastest <= UNEVEN * slowest:
        return Finding("ok", "compute", value)
    return Finding(
        "warning", "compute", f"{value}; rank {found.compute.index(slowest)} is the slowest",
        "In each step all ranks wait for the slowest one.",
        "Look for other programs on its machine, fewer cores or threads, or a GPU that ranks share; "
        "ist(shares=measured) gives slow ranks less to do.",
    )  # fmt: skip


def _spread(rates: Sequence[float]) -> str:
    if not rates:
        return "not measured"
    low, high = format_rate(min(rates)), format_rate(max(rates))
    return f"{low} Mbit/s" if low == high else f"{low} to {high} Mbit/s"
