// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// withoutProof is a backend whose revokes find none in their time.
type withoutProof struct {
	driver.Backend
	enter func()
}

type unprovenMemory struct {
	driver.Memory
	enter func()
}

func (b withoutProof) Register(seg driver.Segment) (driver.Memory, error) {
	m, err := b.Backend.Register(seg)
	return unprovenMemory{m, b.enter}, err
}

func (m unprovenMemory) Revoke(ctx context.Context) error {
	m.enter()
	<-ctx.Done()
	return driver.ContextError(ctx)
}

// TestEachCloseSaysThatNothingIsProved has a second Close beside the first, and a third after it:
// who heard nil would use memory in which bytes may land still.
func TestEachCloseSaysThatNothingIsProved(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	entered := make(chan struct{})
	e, err := engine.Open(engine.Config{Name: "a", AbortGrace: 200 * time.Millisecond,
		Backends: []driver.Backend{withoutProof{b, sync.OnceFunc(func() { close(entered) })}}})
	require.NoError(t, err)
	_, err = e.Register("data", engine.HostSegment(make([]byte, 4096)))
	require.NoError(t, err)
	var all sync.WaitGroup
	var errs [3]error
	all.Go(func() { errs[0] = e.Close() })
	all.Go(func() { <-entered; errs[1] = e.Close() })
	all.Wait()
	errs[2] = e.Close()
	for i, err := range errs {
		require.ErrorIs(t, err, engine.ErrUnproven, "Close %d", i)
	}
}
