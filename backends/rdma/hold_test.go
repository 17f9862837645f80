// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// TestRegisterHolds has pages stay where they are for as long as NICs may know them, and no longer:
// a NIC would go on with the old ones.
func TestRegisterHolds(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	buf, err := hostmem.Alloc(64<<10, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buf.Close() }) // after the backends
	p := &pair{near: openFakeBackend(t, Config{}), far: openFakeBackend(t, Config{KeysMax: 1})}
	p.peer = p.connect(t)
	renews := func(when string, want error) {
		t.Helper()
		if err := buf.Renew(t.Context(), 0, 4096); !errors.Is(err, want) {
			t.Errorf("fresh pages %s: %v, want %v", when, err, want)
		}
	}
	registered, err := p.far.Register(buf.Segment())
	require.NoError(t, err)
	m := registered.(*memory)
	renews("while it is registered", driver.ErrBusy)
	p.imports(t, m)
	fake := fakeOf(p.far)
	fake.mu.Lock()
	fake.stuck = 2
	fake.mu.Unlock()
	if err := m.Revoke(context.Background()); !errors.Is(err, errStuck) {
		t.Fatalf("close memory whose key the NIC keeps: %v", err)
	}
	renews("while a NIC keeps its key", driver.ErrBusy)
	require.NoError(t, m.Revoke(context.Background()))
	renews("when it is closed", nil)
	other := register(t, p.far, 100)
	if _, err := p.far.Register(buf.Segment()); !errors.Is(err, driver.ErrFull) {
		t.Errorf("one memory too many: %v", err)
	}
	renews("after it was refused a key", nil)
	require.NoError(t, other.Revoke(context.Background()))
	p.far.locked = memlock{limits: func() (uint64, uint64, bool) { return 4096, 0, true }}
	if _, err := p.far.Register(buf.Segment()); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("more than may be pinned: %v", err)
	}
	renews("after it was not pinned", nil)
}
