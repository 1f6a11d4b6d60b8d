"""Answers to the exercises of chapter 18, right and wrong."""


def batch(limit=True, absolute=False, sliding=False, strict=False, late=0):
    def first_batch(arrivals, max_batch, max_wait):
        deadline, count = max_wait if absolute else arrivals[0] + max_wait, 0
        for at in arrivals:
            if at > deadline or (strict and at == deadline):
                break
            count += 1
            if sliding:
                deadline = at + max_wait
        return min(count, max_batch + late) if limit else count

    return first_batch


def queue(running=1, partial=False, negative=False, up=False):
    def largest_queue(max_batch, batch_ms, timeout_ms):
        calls = -(-timeout_ms // batch_ms) if up else timeout_ms // batch_ms
        if partial:
            return max(int(max_batch * (timeout_ms / batch_ms - running)), 0)
        free = calls - running
        return (free if negative else max(free, 0)) * max_batch

    return largest_queue


def retry(again=(429, 503, 504), last=3, base=0.5, factor=2, obey=True, add=False):
    def wait_before_retry(status, attempt, retry_after):
        if status not in again or attempt > last:
            return None
        wait = base * factor ** (attempt - 1)
        if retry_after is None or not obey:
            return wait
        return wait + retry_after if add else max(wait, retry_after)

    return wait_before_retry


RIGHT = {
    "first_batch": [batch()],
    "largest_queue": [queue()],
    "wait_before_retry": [retry()],
}

WRONG = {
    "first_batch": [
        batch(limit=False),
        batch(absolute=True),
        batch(sliding=True),
        batch(strict=True),
        batch(late=1),
        lambda arrivals, max_batch, max_wait: min(len(arrivals), max_batch),
    ],
    "largest_queue": [
        queue(running=0),
        queue(running=2),
        queue(partial=True),
        queue(negative=True),
        queue(up=True),
        lambda max_batch, batch_ms, timeout_ms: max(timeout_ms // batch_ms - 1, 0),
        lambda max_batch, batch_ms, timeout_ms: (
            max((timeout_ms - 1) // batch_ms - 1, 0) * max_batch
        ),
    ],
    "wait_before_retry": [
        retry(again=(429, 500, 503, 504)),
        retry(again=(422, 429, 503, 504)),
        retry(again=(429,)),
        retry(last=99),
        retry(last=4),
        retry(factor=1),
        retry(base=1),
        retry(obey=False),
        retry(add=True),
        lambda status, attempt, retry_after: retry_after,
    ],
}
