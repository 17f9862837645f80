// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"

	"github.com/sluicehq/sluice/driver"
)

// Turn lets one goroutine at a time look for the proof that a memory is revoked. It is a lock that
// is waited for no longer than a context.
type Turn chan struct{}

// NewTurn makes one that is free.
func NewTurn() Turn { return make(Turn, 1) }

// Take waits for the turn until ctx is over, and takes one that is free also where it is. The
// caller gives it back, unless there is an error: that of ctx.
func (t Turn) Take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	default:
	}
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return driver.ContextError(ctx)
	}
}

// Give gives the turn back.
func (t Turn) Give() { <-t }
