// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// limit is for a machine that is very busy.
const limit = 20 * time.Second

// open opens a backend that ends with the test. Where a test says no Handshake, connections and
// Imports have as long as the machine needs.
func open(tb testing.TB, cfg Config) *Backend {
	tb.Helper()
	return openBy(tb, clock.Host(), cfg)
}

// openBy is open with a clock of the test. One that stands runs while the backend closes.
func openBy(tb testing.TB, c clock.Clock, cfg Config) *Backend {
	tb.Helper()
	if cfg.TLS == nil {
		cfg.Plaintext = true
	}
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.Handshake == 0 {
		cfg.Handshake = limit
	}
	b, err := newBackend(cfg, c)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		if manual, ok := c.(*testkit.Clock); ok {
			defer manual.Run(time.Second)()
		}
		if err := b.Close(); err != nil {
			tb.Errorf("close: %v", err)
		}
	})
	return b
}

// running is a clock that moves by step in each millisecond in which the test is not stopped.
func running(tb testing.TB, step time.Duration) *testkit.Clock {
	c := testkit.NewClock()
	tb.Cleanup(c.Run(step))
	return c
}

// share registers fresh memory.
func share(tb testing.TB, b *Backend, n uint64) (*memory, []byte) {
	tb.Helper()
	buf, err := hostmem.Alloc(n, hostmem.Options{Purpose: "test of tcp", Populate: true})
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = buf.Close() })
	seg := buf.Segment()
	seg.Secret[0] = 7
	m, err := b.Register(seg)
	require.NoError(tb, err)
	return m.(*memory), seg.Mem
}

func dial(tb testing.TB, b *Backend, addr []byte) *peer {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p, err := b.Connect(ctx, addr)
	require.NoError(tb, err)
	return p.(*peer)
}

// importKey imports memory of a peer.
func importKey(tb testing.TB, p *peer, m *memory) uint32 {
	tb.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(tb, err)
	key, _, err := p.Import(token)
	require.NoError(tb, err)
	return key
}

// await polls until a tag is complete.
func await(tb testing.TB, b *Backend, tag uint64) error {
	tb.Helper()
	var done [1]driver.Completion
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
		n, err := b.Poll(done[:])
		require.NoError(tb, err)
		if n == 1 && done[0].Tag == tag {
			return done[0].Err
		}
	}
	tb.Fatalf("tag %d does not complete", tag)
	return nil
}

func wantError(tb testing.TB, what string, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Errorf("%s: %v, want %v", what, err, want)
	}
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}
