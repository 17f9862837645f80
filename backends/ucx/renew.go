// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// An allocation is a driver.Shared of which this backend alone has the descriptors, and alone moves
// the pages.
var (
	_ driver.Shared = (*allocation)(nil)
	_ driver.Holder = (*allocation)(nil)
)

// Lend implements driver.Shared: UCX gives no descriptor away.
func (a *allocation) Lend(func([]driver.Extent) error) error {
	return fmt.Errorf("lend memory of UCX: %w", driver.ErrNotSupported)
}

// OnRenew implements driver.Shared.
func (a *allocation) OnRenew(f func() func() bool) (stop func()) { return a.renewals.OnRenew(f) }

// Renew implements driver.Shared: only a fence moves the pages.
func (a *allocation) Renew(context.Context, uint64, uint64) error {
	return fmt.Errorf("renew memory of UCX: %w", driver.ErrNotSupported)
}

// Enter implements driver.Shared.
func (a *allocation) Enter() { a.landings.Enter() }

// TryEnter implements driver.Shared.
func (a *allocation) TryEnter() bool { return a.landings.TryEnter() }

// Leave implements driver.Shared.
func (a *allocation) Leave() { a.landings.Leave() }

// Hold implements driver.Holder.
func (a *allocation) Hold() (release func(), err error) {
	a.moving.Lock()
	defer a.moving.Unlock()
	a.of.mu.Lock()
	defer a.of.mu.Unlock()
	if a.closed {
		return nil, fmt.Errorf("hold memory: %w", driver.ErrClosed)
	}
	a.holds++
	return sync.OnceFunc(func() {
		a.of.mu.Lock()
		a.holds--
		a.of.mu.Unlock()
	}), nil
}

// renew has move put other pages under the allocation while nothing else lands there.
func (a *allocation) renew(ctx context.Context, move func() error) error {
	a.moving.Lock()
	defer a.moving.Unlock()
	a.of.mu.Lock()
	holds := a.holds
	a.of.mu.Unlock()
	if holds > 0 {
		return fmt.Errorf("renew memory whose pages %d registrations with other backends hold, "+
			"close those first: %w", holds, driver.ErrBusy)
	}
	if err := a.landings.Stop(ctx); err != nil {
		return fmt.Errorf("renew memory: %w", err)
	}
	defer a.landings.Resume()
	a.renewals.Tell()
	return move()
}
