// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/internal/procs"
)

// silenceMax is how long the target may say nothing: ten signs of life.
const silenceMax = 5 * time.Second

// Watch ends the context when the target is silent for too long: a measurement
// that spins until an answer comes has no limit of its own. Call what it returns.
func (p *Pair) Watch(ctx context.Context) (context.Context, context.CancelFunc) {
	return p.watchFor(ctx, silenceMax)
}

func (p *Pair) watchFor(ctx context.Context, most time.Duration) (context.Context,
	context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	if p.target != nil {
		go p.listen(ctx, cancel, most)
	}
	return ctx, func() { cancel(nil) }
}

func (p *Pair) listen(ctx context.Context, cancel context.CancelCauseFunc, most time.Duration) {
	tick := time.NewTicker(silenceMax / 5)
	defer tick.Stop()
	for before := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		// A look alone may be the first one after a pause of this process.
		since := p.target.Silent()
		silent := since > most || since > silenceMax && p.target.Stopped()
		if silent && before {
			cancel(p.silence())
			return
		}
		before = silent
	}
}

// errSilent is what the error of a target that does not answer is.
var errSilent = errors.New("it is stopped or starved")

func (p *Pair) silence() error {
	return fmt.Errorf("target process (pid %d) has not answered for %v: %w", p.target.PID,
		p.target.Silent().Round(100*time.Millisecond), errSilent)
}

// grace is how long the target may take to end: one that is silent has had its
// time.
func (p *Pair) grace() time.Duration {
	if p.silent || p.target.Silent() > silenceMax {
		return 0
	}
	return stopGrace
}

// Explain prefers the death of the target, or its silence, to their consequences. What
// the target says itself needs no explanation.
func (p *Pair) Explain(ctx context.Context, err error) error {
	var said *saidError
	if p.target == nil || errors.As(err, &said) {
		return err
	}
	if ctx.Err() != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errSilent) && !errors.Is(err, errSilent) {
			return fmt.Errorf("%w (then: %w)", cause, err) // the watch ended it
		}
		return err
	}
	tick := time.NewTicker(procs.AliveEvery / 20)
	defer tick.Stop()
	for failed := time.Now(); ; {
		select {
		case <-p.target.Exited():
			death := p.target.ExitError()
			if death == nil || death.Error() == err.Error() {
				return err
			}
			return fmt.Errorf("%w (then: %w)", death, err)
		case <-tick.C:
		}
		switch silent, since := p.target.Silent(), time.Since(failed); {
		case silent > 4*procs.AliveEvery:
			p.silent = true
			if errors.Is(err, errSilent) {
				return err
			}
			return fmt.Errorf("%w (then: %w)", p.silence(), err)
		case silent < since && since > 200*time.Millisecond:
			return err // it lives
		}
	}
}
