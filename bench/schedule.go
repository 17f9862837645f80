// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"time"
)

// errLate is the reason of what there was no time for.
var errLate = errors.New("left out: the time of the run was over")

// part is a piece of a run. Its weight is its share of the time that is left, beside the
// weights of the parts after it: what one does not need is the others'.
type part struct {
	weight float64
	run    func(ctx context.Context, until time.Time) error
}

// inTurn runs parts until end. A part that begins late runs all the same, to say of all that
// it holds that there was no time. ctx ends what hangs.
func inTurn(ctx context.Context, clock func() time.Time, end time.Time, parts []part) error {
	for i := range parts {
		whole := 0.0
		for _, p := range parts[i:] {
			whole += p.weight
		}
		now := clock()
		share := float64(end.Sub(now)) * parts[i].weight / whole
		if err := parts[i].run(ctx, now.Add(time.Duration(share))); err != nil {
			return err
		}
	}
	return nil
}

// ended is the error of a run that was ended. One whose time is over goes on, to say so of
// what it did not measure.
func ended(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil && !errors.Is(err, errLate) {
		return err
	}
	return nil
}

// reserve is the part of the limit that is left for the last measurement of each part, which
// begins in time and ends after it, and for the ends of processes.
const reserve = 20

// bounds are the end of the last part, and a context that ends whatever hangs at the limit.
func bounds(ctx context.Context, begun time.Time, limit time.Duration) (context.Context,
	context.CancelFunc, time.Time) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errLate)
	return ctx, cancel, begun.Add(limit - limit/reserve)
}
