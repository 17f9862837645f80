// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// leaseWithoutProof is a lease of which Revoke has failed. Revokes fail until proof is set.
func leaseWithoutProof(t *testing.T) (e *Engine, r *Region, l *Lease, asked *atomic.Int64,
	proof *atomic.Bool) {
	t.Helper()
	asked, proof = new(atomic.Int64), new(atomic.Bool)
	f := &fake{onRevoke: func(ctx context.Context) error {
		asked.Add(1)
		if proof.Load() {
			return nil
		}
		return driver.ErrUnproven
	}}
	e = open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	r = register(t, e, "r", 1<<16)
	l, err := r.Lease(0, 4096, LeaseOptions{TTL: time.Hour})
	check(t, err)
	t.Cleanup(func() { proof.Store(true) }) // before the engine closes
	require.ErrorIs(t, l.Revoke(context.Background()), ErrUnproven)
	return e, r, l, asked, proof
}

// TestLeaseGoesOnceTheProofIsThere: the program has called Revoke once and let go of the lease. The
// engine looks for the proof, ever more seldom, and ends the lease when it has it.
func TestLeaseGoesOnceTheProofIsThere(t *testing.T) {
	testkit.InVirtualTime(t, func(t *testing.T) {
		e, r, l, asked, proof := leaseWithoutProof(t)
		began := asked.Load()
		time.Sleep(10 * time.Minute)
		if n := asked.Load() - began; n < 10 || n > 100 {
			t.Errorf("%d looks in ten minutes", n)
		}
		proof.Store(true)
		time.Sleep(revokeAgainMax)
		select {
		case <-l.Revoked():
		default:
			t.Error("the proof is there, and the lease stands")
		}
		require.Zero(t, e.Stats().Leases)
		check(t, r.Close())
	})
}

// TestRegionCloseLooksForTheProof of leases that were revoked without one, at once.
func TestRegionCloseLooksForTheProof(t *testing.T) {
	testkit.InVirtualTime(t, func(t *testing.T) {
		_, r, l, _, proof := leaseWithoutProof(t)
		err := r.Close()
		if !errors.Is(err, ErrBusy) || !errors.Is(err, ErrUnproven) {
			t.Errorf("close of a region with a lease without a proof: %v", err)
		}
		proof.Store(true)
		check(t, r.Close())
		<-l.Revoked()
	})
}
