"""The figures at the top of a run's page, each beside the paper's and that of MAP where there are any."""

from dataclasses import dataclass, replace

from bayestrain.report import words
from bayestrain.report.paper import PAPER, Published
from bayestrain.report.run import Posterior, Run, Scores


@dataclass(frozen=True)
class Card:
    """One headline figure; the verdicts say how it stands to the paper's and to that of MAP."""

    label: str
    value: str
    paper: str = ""
    verdict: str = ""
    note: str = ""
    map: str = ""
    map_verdict: str = ""


def headline(run: Run) -> list[Card]:
    """Six figures of a network, eight of a posterior. A dense one has no compression to speak of."""
    cards = _of_network(run)
    return cards if run.posterior is None else _of_posterior(run, run.posterior, cards)


def _of_network(run: Run) -> list[Card]:
    scores, dense = run.scores, run.kind == "dense"
    asked = f"{words.ratio(run.target_ratio)} was asked for" if run.target_ratio else ""
    before = f"after {words.duration(run.begun.seconds)} of earlier training; " if run.begun else ""
    cards = [
        Card("Parameters", words.count(scores.params), note="all dense" if dense else
             f"of {words.count(scores.dense_params)}"),
        Card("Compression", words.ratio(scores.ratio), note=asked or "smaller than the dense network"),
        Card("Test accuracy", words.percent(scores.accuracy)),
        Card("Log likelihood", words.signed(scores.log_likelihood),
             note=_calibrated(scores, words.signed(scores.calibrated_log_likelihood)) or "mean per test image"),
        Card("Calibration error", words.percent(scores.ece),
             note=_calibrated(scores, words.percent(scores.calibrated_ece)) or "expected (ECE), 0 is perfect"),
        Card("Time", words.duration(scores.seconds),
             note=f"{before}peak memory {words.size(scores.peak_memory_bytes)}"),
    ]  # fmt: skip
    if scores.ratio is None:
        cards[1] = Card("Compression", "–")
    cards[:4] = _beside_paper(run, *cards[:4])
    if dense:
        del cards[1]
        cards.insert(4, Card("Brier score", words.signed(scores.brier), note="0 is perfect"))
    return cards


def _calibrated(scores: Scores, figure: str) -> str:
    """A figure of a single network at the temperature that suits it; nothing where none was found."""
    return "" if scores.temperature is None else f"{figure} at temperature {scores.temperature:.2f}"


def _beside_paper(run: Run, size: Card, ratio: Card, accuracy: Card, likelihood: Card) -> list[Card]:
    """Cards with the paper's figures of the same kind of network, where it has any, instead of a note."""
    scores, paper = run.scores, published(run)
    if paper is None:
        return [size, ratio, accuracy, likelihood]
    size = replace(size, paper=words.count(paper.params), verdict=verdict(scores.params, paper.params, True),
                   note=size.note if run.kind == "dense" else "")  # fmt: skip
    ratio = replace(ratio, paper=words.ratio(paper.ratio), verdict=verdict(scores.ratio, paper.ratio),
                    note=ratio.note if run.target_ratio else "")  # fmt: skip
    if paper.accuracy is not None:
        judged = verdict(scores.accuracy, paper.accuracy)
        accuracy = replace(accuracy, paper=words.percent(paper.accuracy, 1), verdict=judged)
    if paper.log_likelihood is not None:
        judged = verdict(scores.log_likelihood, paper.log_likelihood)
        note = likelihood.note if scores.temperature is not None else ""
        likelihood = replace(likelihood, paper=words.signed(paper.log_likelihood), verdict=judged, note=note)
    return [size, ratio, accuracy, likelihood]


def published(run: Run) -> Published | None:
    """The paper's figures of the same experiment and kind of network."""
    paper = PAPER.get(run.experiment)
    return paper.of(run.kind) if paper else None


def _of_posterior(run: Run, posterior: Posterior, cards: list[Card]) -> list[Card]:
    """The paper averages the particles' log likelihoods, so its figure stands beside that average."""
    of = {card.label: card for card in cards}
    scores, other, paper = run.scores, run.rival.scores if run.rival else None, published(run)
    likelihood, alone = of["Log likelihood"], posterior.mean_log_likelihood
    cards = [
        replace(of["Parameters"], note=f"in each of {posterior.particles} particles"),
        *([of["Compression"], of["Test accuracy"]] if "Compression" in of else
          [of["Test accuracy"], _each_accuracy(posterior)]),
        replace(of["Calibration error"], note="expected (ECE), 0 is perfect"),
        Card("Log likelihood", likelihood.value, note="log of the particles’ mean probability"),
        Card("Particles’ log likelihood", words.signed(alone), likelihood.paper,
             verdict(alone, paper.log_likelihood) if paper else "", "mean of each one’s own"),
        _last_score(run),
        of["Time"],
    ]  # fmt: skip
    if other is None:
        return cards
    pairs = {
        "Parameters": (words.count(other.params), verdict(scores.params, other.params, True)),
        "Test accuracy": (words.percent(other.accuracy), verdict(scores.accuracy, other.accuracy)),
        "Calibration error": (words.percent(other.ece), verdict(scores.ece, other.ece, True)),
        "Log likelihood": (words.signed(other.log_likelihood), verdict(scores.log_likelihood, other.log_likelihood)),
        "Time": (words.duration(other.seconds), ""),
    }
    for place, card in enumerate(cards):
        value, judged = pairs.get(card.label, ("–", ""))
        if value != "–":
            cards[place] = replace(card, map=value, map_verdict=judged)
    return cards


def _each_accuracy(posterior: Posterior) -> Card:
    known = [accuracy for accuracy in posterior.accuracies if accuracy is not None]
    mean = sum(known) / len(known) if known else None
    return Card("Particles’ accuracy", words.percent(mean), note="mean of each one’s own")


def _last_score(run: Run) -> Card:
    """Telling another data set where there was one, else the Brier score."""
    if run.ood and run.ood.auroc is not None:
        theirs = run.map.ood_auroc if run.map else None
        return Card(
            "Out-of-distribution AUROC",
            words.area(run.ood.auroc),
            note=f"{run.ood.name}, by total uncertainty",
            map="" if theirs is None else words.area(theirs),
            map_verdict=verdict(run.ood.auroc, theirs),
        )
    theirs = run.rival.scores.brier if run.rival else None
    return Card(
        "Brier score",
        words.signed(run.scores.brier),
        note="0 is perfect",
        map="" if theirs is None else words.signed(theirs),
        map_verdict=verdict(run.scores.brier, theirs, True),
    )


def verdict(ours: float | None, theirs: float | None, smaller_is_better: bool = False) -> str:
    """Whether ours is "better" or "worse"; empty if they are equal or one is unknown."""
    if ours is None or theirs is None or ours == theirs:
        return ""
    return "better" if (ours < theirs) == smaller_is_better else "worse"
