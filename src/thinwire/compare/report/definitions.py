"""What the words of a report mean."""

DEFINITIONS = {
    "Bytes sent (wire bytes)": "What a rank handed to the network to send, as thinwire's ledger counts it: the data of "
    "each operation in the pattern it travels in, without the headers of lower layers.",
    "Kernel bytes": "What the operating system's network interfaces counted on the same link, with headers and "
    "repeated packets. A few per cent above the ledger is normal, and more where messages are small: each costs "
    "some hundred bytes of its own.",
    "Sent in training": "The bytes of training steps and of bringing models together between them, without start, "
    "evaluation and checkpoints (sent otherwise). Where there are several nodes, those that left the node of their "
    "sender, all ranks together: ranks of a node share its link. On one node, those of a rank on average.",
    "× data_parallel, × alone": "How many times as fast training was: the training time of that strategy, or of one "
    "machine alone, over this one's.",
    "alone": "One machine by itself: a node, or a rank where there is one node. It trains on all the data, with the "
    "same samples in every update, while the other machines do the same. Nothing crosses between machines in training; "
    "its model is sent to the others for evaluation.",
    "Underlined": "The best of a column, and all that cannot be told apart from it. If all strategies were equally "
    "good, all would be underlined in about 95 of 100 comparisons. One deviation serves for all strategies (the median "
    "of theirs; where that is 0, the root of their mean variance), so that equal means are marked alike. Bytes do not "
    "vary by chance; with one seed nothing else is underlined.",
    "Within noise": "Two strategies that these seeds cannot tell apart. Equally good ones are told apart in at most "
    "about 5 of 100 pairs. A difference must be larger than both the deviation of all strategies and their own two "
    "explain, so a strategy that is not underlined may still be the same as another within noise.",
    "Updates, samples": "Steps of the optimizer, and samples that went into the model.",
    "Waiting": "The share of training time in which computing stood still for the network, or for another rank.",
    "Samples per s": "Training samples of all ranks per second of training.",
    "Training time": "Time in training steps, without evaluation, checkpoints and starting up.",
    "Time to target": "Training time until an evaluation was first as good as the target; mean over the seeds that "
    "reached it.",
    "± deviation": "The sample standard deviation over seeds. With one seed there is none.",
    "Peak memory": "The most that any one rank held.",
}
