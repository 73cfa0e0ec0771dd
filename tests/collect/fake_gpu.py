"""A fake GPU with one queue, on the CPU: copies happen only when something waits for them."""

import torch

from hurtle.collect.transfer import CudaCopies


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.place = gpu, 0

    def synchronize(self):
        self.gpu.run(self.place)


class FakeGpu(CudaCopies):
    """The GPU operations that `Staging` needs.

    Launched work stays in a queue until an event after it is waited for. With `late_uploads=False`, copies to the device happen
    at once, for code that continues to compute with them, here on the CPU.

    Attributes:
        log: "upload", "download", and "wait" where the host had to wait for something.
        pinned_count: Number of buffers allocated.
    """

    def __init__(self, late_uploads=True):
        super().__init__(torch.device("cpu"))
        self.late_uploads = late_uploads
        self.queue, self.done = [], 0
        self.log, self.pinned_count = [], 0

    def pinned(self, shape, dtype):
        self.pinned_count += 1
        return torch.full(shape, 77).to(dtype)

    def upload(self, buffer):
        self.log.append("upload")
        tensor = torch.full_like(buffer, 55) if self.late_uploads else buffer.clone()
        if self.late_uploads:
            self.queue.append(lambda: tensor.copy_(buffer))
        return tensor

    def download(self, tensor, buffer):
        self.log.append("download")
        self.queue.append(lambda: buffer.copy_(tensor))

    def event(self):
        return FakeEvent(self)

    def record(self, event):
        event.place = len(self.queue)

    def run(self, place):
        if place > self.done:
            self.log.append("wait")
        for work in self.queue[self.done : place]:
            work()
        self.done = max(self.done, place)
