// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/promise"
	"github.com/sluicehq/sluice/internal/testing/virtual"
)

func TestLease(t *testing.T) {
	owner, holder := open(t, "owner"), open(t, "holder")
	buffer, err := hostmem.Alloc(1<<20, hostmem.Options{Purpose: "test"})
	check(t, err)
	defer buffer.Close()
	pool, err := owner.RegisterPrivate("pool", buffer.Segment())
	check(t, err)
	src := register(t, holder, "src", 1<<20)
	fill(src.Bytes(), 5)
	p := connect(t, holder, owner)
	if names := p.Remotes(); len(names) != 0 {
		t.Errorf("a private region is described: %q", names)
	}

	l, err := pool.Lease(4096, 8192, LeaseOptions{})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	if m.Size() != 8192 || m.Name() != "pool" {
		t.Errorf("leased %d bytes of %q", m.Size(), m.Name())
	}
	tr := transfer(t, p, Write)
	if err := tr.Add(src, 0, m, 1, 8192); !errors.Is(err, ErrBounds) {
		t.Errorf("past the lease: %v", err)
	}
	check(t, tr.Add(src, 0, m, 0, 8192))
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	if !bytes.Equal(pool.Bytes()[4096:4096+8192], src.Bytes()[:8192]) || pool.Bytes()[4095] != 0 ||
		pool.Bytes()[4096+8192] != 0 {
		t.Error("the leased range does not hold what was written")
	}
	if err := pool.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("closing a region with a lease: %v", err)
	}

	check(t, l.Revoke(within(t)))
	check(t, l.Revoke(within(t)))
	<-l.Revoked()
	clear(pool.Bytes())
	check(t, tr.Post())
	if err := tr.Wait(within(t)); !errors.Is(err, ErrRevoked) {
		t.Errorf("write after Revoke: %v", err)
	}
	if bytes.ContainsFunc(pool.Bytes(), func(r rune) bool { return r != 0 }) {
		promise.Breaks(t, "bytes landed after Revoke")
	}
	if _, err := p.Import(l.Token()); !errors.Is(err, ErrRevoked) &&
		!errors.Is(err, driver.ErrBadToken) {
		t.Errorf("import of an ended lease: %v", err)
	}
	check(t, tr.Reset())
	check(t, m.Close())
	check(t, pool.Close())
}

func TestLeaseExpires(t *testing.T) { virtual.Time(t, leaseExpires) }

func leaseExpires(t *testing.T) {
	owner, holder := open(t, "owner"), open(t, "holder")
	pool := register(t, owner, "pool", 1<<16)
	p := connect(t, holder, owner)
	l, err := pool.Lease(0, 4096, LeaseOptions{TTL: 20 * time.Millisecond})
	check(t, err)
	select {
	case <-l.Revoked():
	case <-time.After(limit):
		t.Fatal("the lease did not end by its time")
	}
	if _, err := p.Import(l.Token()); err == nil {
		t.Error("an expired lease was imported")
	}
	if n := owner.Stats().Leases; n != 0 {
		t.Errorf("%d leases are left", n)
	}
}

func TestReadOnlyLease(t *testing.T) {
	owner, holder := open(t, "owner"), open(t, "holder")
	pool, local := register(t, owner, "pool", 1<<16), register(t, holder, "local", 1<<16)
	fill(pool.Bytes(), 1)
	p := connect(t, holder, owner)
	l, err := pool.Lease(0, 4096, LeaseOptions{ReadOnly: true})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	if err := transfer(t, p, Write).Add(local, 0, m, 0, 1); !errors.Is(err, driver.ErrReadOnly) {
		t.Errorf("write: %v", err)
	}
	tr := transfer(t, p, Read)
	check(t, tr.Add(local, 0, m, 0, 4096))
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	if !bytes.Equal(local.Bytes()[:4096], pool.Bytes()[:4096]) {
		t.Error("other bytes were read")
	}
}

func TestForeignAndBrokenTokens(t *testing.T) {
	owner, other, holder := open(t, "owner"), open(t, "other"), open(t, "holder")
	pool := register(t, owner, "pool", 1<<16)
	register(t, other, "pool", 1<<16)
	l, err := pool.Lease(0, 4096, LeaseOptions{})
	check(t, err)
	token := l.Token()
	p := connect(t, holder, other)
	if _, err := p.Import(token); !errors.Is(err, driver.ErrBadToken) {
		t.Errorf("the lease of another engine: %v", err)
	}
	q := connect(t, holder, owner)
	for n := range token {
		if _, err := q.Import(token[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("token cut to %d bytes: %v", n, err)
		}
	}
	for i := range token {
		bad := bytes.Clone(token)
		bad[i] ^= 0x10
		if _, err := q.Import(bad); err == nil {
			t.Fatalf("token with byte %d altered was accepted", i)
		}
	}
	for _, bad := range [][2]uint64{{0, 0}, {0, 1<<16 + 1}, {1 << 16, 1}, {^uint64(0), 2}} {
		if _, err := pool.Lease(bad[0], bad[1], LeaseOptions{}); !errors.Is(err, ErrBounds) {
			t.Errorf("lease of %v: %v", bad, err)
		}
	}
}

// TestRevokeWaitsNoLongerThanItsContext has a fence that takes its time, on behalf
// of somebody else.
func TestRevokeWaitsNoLongerThanItsContext(t *testing.T) {
	virtual.Time(t, revokeWaitsNoLongerThanItsContext)
}

func revokeWaitsNoLongerThanItsContext(t *testing.T) {
	fencing, fenced := make(chan struct{}, 9), make(chan struct{})
	f := &fake{onRevoke: func(context.Context) error {
		fencing <- struct{}{}
		<-fenced
		return nil
	}}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	l, err := register(t, e, "r", 64).Lease(0, 64, LeaseOptions{})
	check(t, err)
	first := make(chan error)
	go func() { first <- l.Revoke(context.Background()) }()
	<-fencing
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	second := make(chan error, 1)
	go func() { second <- l.Revoke(ctx) }()
	select {
	case err := <-second:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	case <-time.After(limit):
		t.Error("Revoke outlives its context")
	}
	close(fenced)
	check(t, <-first)
	check(t, l.Revoke(context.Background()))
}

// TestRemoteInUse: the key of a leased range that a transfer lists may not be
// given to other memory.
func TestRemoteInUse(t *testing.T) {
	p, src, _, dst := pair(t, 1<<16)
	l, err := dst.Lease(0, 4096, LeaseOptions{})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 64))
	if err := m.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("close of a remote that a transfer lists: %v", err)
	}
	check(t, tr.Reset())
	check(t, m.Close())
	check(t, l.Revoke(within(t)))
}
