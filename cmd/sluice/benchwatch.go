// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// silenceMax is how long the target may say nothing: ten signs of life.
const silenceMax = 5 * time.Second

// watch ends the context when the target is silent for too long: a measurement
// that spins until an answer comes has no limit of its own. Call what it returns.
func (l *benchLink) watch(ctx context.Context) (context.Context, context.CancelFunc) {
	return l.watchFor(ctx, silenceMax)
}

func (l *benchLink) watchFor(ctx context.Context, most time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	if l.target != nil {
		go l.listen(ctx, cancel, most)
	}
	return ctx, func() { cancel(nil) }
}

func (l *benchLink) listen(ctx context.Context, cancel context.CancelCauseFunc, most time.Duration) {
	tick := time.NewTicker(silenceMax / 5)
	defer tick.Stop()
	for before := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		// A look alone may be the first one after a pause of this process.
		silent := l.target.Silent() > most
		if silent && before {
			cancel(l.silence())
			return
		}
		before = silent
	}
}

// errSilent is what the error of a target that does not answer is.
var errSilent = errors.New("it is stopped or starved")

func (l *benchLink) silence() error {
	return fmt.Errorf("target process (pid %d) has not answered for %v: %w", l.target.PID, l.target.Silent().Round(100*time.Millisecond), errSilent)
}

// grace is how long the target may take to end: one that is silent has had its
// time.
func (l *benchLink) grace() time.Duration {
	if l.silent || l.target.Silent() > silenceMax {
		return 0
	}
	return stopGrace
}
