// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// limit bounds every wait of these tests.
const limit = time.Minute

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// poison fills the memory of all ranks before the first request.
const poison = 0xEE

func connect(t testing.TB, from, to *engine.Engine) *engine.Peer {
	t.Helper()
	d, err := to.Describe()
	require.NoError(t, err)
	p, err := from.Connect(within(t), d)
	require.NoError(t, err)
	return p
}

// over runs a test with each backend that the two sides may have in common, mem in virtual time.
func over(t *testing.T, test func(t *testing.T, open func(testing.TB) driver.Backend)) {
	testkit.RunInVirtualTime(t, "mem", func(t *testing.T) { test(t, newMem) })
	t.Run("shm", func(t *testing.T) { test(t, newShm) })
}

func newMem(t testing.TB) driver.Backend {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	return b
}

// newSlowMem is mem whose transfers take up to a millisecond, so that in virtual time some are met
// in flight.
func newSlowMem(t testing.TB) driver.Backend {
	t.Helper()
	late := fault.Late(500*time.Microsecond, 500*time.Microsecond)
	b, err := fault.Wrap(newMem(t), 0, fault.Rule{On: fault.Write, Chance: 0.7, Do: late},
		fault.Rule{On: fault.Read, Chance: 0.7, Do: late})
	require.NoError(t, err)
	return b
}

func newShm(t testing.TB) driver.Backend {
	t.Helper()
	b, err := shm.New(shm.Config{})
	require.NoError(t, err)
	return b
}

// await waits for something that has no channel of its own.
func await(t *testing.T, what string, f func() bool) {
	t.Helper()
	for start := time.Now(); !f(); time.Sleep(time.Millisecond) {
		if time.Since(start) > limit {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
