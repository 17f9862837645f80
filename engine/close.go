// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Close ends the transfers (ErrClosed), revokes the leases, and closes peers,
// regions and backends. It is idempotent, waits for a Close that runs already, and
// is bounded by AbortGrace and by what the backends promise. Each call returns what the first did:
// ErrUnproven when bytes may land still in a region.
func (e *Engine) Close() error {
	e.closeOnce.Do(func() { e.closeErr = e.shut() })
	return e.closeErr
}

func (e *Engine) shut() error {
	e.mu.Lock()
	e.closed = true // nothing is added to the sets from here on
	peers, leases := keys(e.peers), keys(e.leases)
	var regions []*Region
	for _, r := range e.regions {
		if r.mems != nil { // otherwise Register sees that we close
			regions = append(regions, r)
		}
	}
	e.mu.Unlock()
	e.endLife()
	e.stager.drain()

	errs := []error{
		atOnce(peers, (*Peer).Close),
		atOnce(leases, func(l *Lease) error { return unrevoked(l.end(e.cfg.AbortGrace)) }),
		atOnce(regions, func(r *Region) error { return unrevoked(r.release(true)) }),
	}
	close(e.closing)
	for _, l := range e.lanes {
		l.close()
	}
	errs = append(errs, e.stager.Close(), closeBackends(e.cfg.Backends))
	e.sweeper.stop()
	e.reapLast()
	e.running.Wait()
	return errors.Join(append(errs, e.givenUp.proof())...)
}

// unrevoked says of a Revoke that failed, also by its time, that bytes may land still.
func unrevoked(err error) error {
	if err == nil || errors.Is(err, ErrUnproven) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnproven, err)
}

// reapLast takes the completions that the backends had left. A transfer without
// one by then, against all promises, is given up: its waiters must not outlive us.
func (e *Engine) reapLast() {
	for end := e.now() + e.cfg.AbortGrace; ; time.Sleep(time.Millisecond) {
		for _, l := range e.lanes {
			l.poll()
		}
		if e.slots.posted() == 0 {
			return
		}
		if e.now() > end {
			break
		}
	}
	for i := range e.slots.live {
		t := e.slots.live[i].Load()
		if t == nil {
			continue
		}
		if generation, ok := t.holdPost(); ok {
			t.fail(generation, ErrClosed)
			t.abandon(generation)
			t.letGo()
		}
	}
}

// closersMax is how many peers, leases or regions Close ends at once, so that a
// frozen peer here and there does not add up.
const closersMax = 64

func atOnce[T any](list []T, end func(T) error) error {
	errs := make([]error, len(list))
	places := make(chan struct{}, closersMax)
	var all sync.WaitGroup
	for i, v := range list {
		places <- struct{}{}
		all.Go(func() {
			errs[i] = end(v)
			<-places
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func closeBackends(list []driver.Backend) error {
	var errs []error
	for _, b := range list {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

func keys[K comparable](set map[K]struct{}) []K {
	list := make([]K, 0, len(set))
	for k := range set {
		list = append(list, k)
	}
	return list
}
