"""What the torch driver leans on in gloo; if one of these fails, a torch release has changed it."""

import torch
import torch.distributed as dist

from tests.helpers.fork import fork_ranks


def test_a_message_may_be_shorter_than_the_receive_buffer():
    def body(rank):
        if rank == 0:
            dist.send(torch.arange(3, dtype=torch.uint8), 1)
            dist.send(torch.empty(0, dtype=torch.uint8), 1)
            return None
        buffer = torch.full((8,), 255, dtype=torch.uint8)
        dist.recv(buffer, 0)
        dist.recv(torch.empty(0, dtype=torch.uint8), 0)
        return buffer.tolist()

    assert fork_ranks(2, body)[1] == [0, 1, 2, 255, 255, 255, 255, 255]


def test_tags_tell_messages_apart_and_one_tag_keeps_the_order():
    def body(rank):
        if rank == 0:
            works = [dist.isend(torch.tensor([value]), 1, tag=tag) for value, tag in ((1, 7), (2, 7), (3, 5))]
            [work.wait() for work in works]
            return None
        buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        works = [dist.irecv(buffer, 0, tag=tag) for buffer, tag in zip(buffers, (5, 7, 7), strict=True)]
        [work.wait() for work in works]
        return [int(buffer) for buffer in buffers]

    assert fork_ranks(2, body)[1] == [3, 1, 2]
