// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"fmt"
	"sync/atomic"

	limiter "golang.org/x/time/rate"

	"github.com/sluicehq/sluice/engine"
)

// byteRates are the bytes a second that each namespace may copy; nil: any number.
type byteRates [spacesMax]atomic.Pointer[limiter.Limiter]

// limit sets how many bytes a second a namespace may copy; 0: any number.
func (sp *spaces) limit(id int, bytesASecond uint64) {
	l := sp.rates[id].Load()
	switch {
	case bytesASecond == 0:
		sp.rates[id].Store(nil)
	case l == nil:
		sp.rates[id].Store(limiter.NewLimiter(limiter.Limit(bytesASecond), batchBytes))
	default:
		l.SetLimit(limiter.Limit(bytesASecond))
	}
}

// awaitRate waits until the namespace may copy so many blocks. It is ErrExpired at once where that
// would not be before ctx ends.
func (n *Namespace) awaitRate(ctx context.Context, blocks int, size uint32) error {
	l := n.c.spaces.rates[n.id].Load()
	if l == nil {
		return nil
	}
	for left := uint64(blocks) * uint64(size); left > 0; {
		some := min(left, batchBytes)
		if err := l.WaitN(ctx, int(some)); ctx.Err() != nil {
			return context.Cause(ctx)
		} else if err != nil {
			return fmt.Errorf("namespace %q has copied its %.0f bytes a second: %w", n.name,
				float64(l.Limit()), engine.ErrExpired)
		}
		left -= some
	}
	return nil
}
