"""What the words on the page mean."""

DEFINITIONS = {
    "Bytes sent (wire bytes)": "The bytes that a rank puts on the network, as thinwire's ledger counts them: the data "
    "of each operation, by the formula of its algorithm, without the headers of network packets.",
    "Kernel bytes": "The bytes that the network interfaces of the Linux kernel counted on the same link, with headers "
    "and repeated packets. A few per cent more than the ledger is normal. Small messages add more, because each costs "
    "some hundred bytes of its own.",
    "Sent in training": "The bytes of training steps and of the exchanges between them, without start, evaluation and "
    "checkpoints (those are “sent otherwise”). With several nodes: the bytes that left a node, all ranks together, "
    "because the ranks of a node share its link. On one node: the bytes of a rank on average.",
    "× data_parallel, × alone": "How many times as fast training was: the training time of data_parallel, or of one "
    "machine alone, divided by that of this strategy.",
    "alone": "One machine by itself: a node, or a rank if there is only one node. It trains on all the data, with the "
    "same samples in every update as all machines together otherwise. All machines do the same at the same time. "
    "Nothing is sent between machines in training; for evaluation, the first machine sends its model to the others.",
    "Underlined": "The best value of a column, and all values that cannot be told apart from it. If all strategies "
    "were equally good, all would be underlined in about 95 of 100 comparisons. One deviation is used for all "
    "strategies (the median of theirs; if that is 0, the root of their mean variance), so that equal means are treated "
    "equally. Bytes do not vary by chance. With one seed, only bytes are underlined.",
    "Within noise": "These seeds cannot tell the two strategies apart. Two equally good strategies are called "
    "different in at most about 5 of 100 cases. A difference must be larger than the deviation of all strategies "
    "explains, and larger than the deviations of these two explain. So a strategy that is not underlined can still be "
    "within noise of another.",
    "Updates, samples": "Steps of the optimizer, and samples that went into the model.",
    "Waiting": "The share of training time in which computing stood still for the network or for another rank.",
    "Samples per s": "Training samples of all ranks per second of training.",
    "Training time": "Time in training steps, without start, evaluation and checkpoints.",
    "Time to target": "Training time until an evaluation first reached the target: mean over seeds that reached it.",
    "± deviation": "The sample standard deviation over seeds. With one seed there is none.",
    "Peak memory": "The most memory that any rank held.",
}
