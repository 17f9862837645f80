// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestTimedOwnerOfAnotherProcess writes to it, freezes it, and kills it.
func TestTimedOwnerOfAnotherProcess(t *testing.T) {
	cfg := peersConfig()
	cfg.DialTimeout = limit
	r := newRig(t, cfg)
	o := startOwner(t)
	owner, addr, token := o.Process, o.addr, o.token
	connect := func() (driver.Peer, error) {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		return r.b.Connect(ctx, addr)
	}
	one, err := connect()
	require.NoError(t, err)
	r.p = one.(*peer)
	key, size, err := one.Import(token)
	if err != nil || size != 1<<20 {
		t.Fatalf("import: %d bytes, %v", size, err)
	}
	l := r.local(drivertest.HostMemory, 1<<20)
	back := r.local(hbm, 1<<20)
	there := &place{key: key}
	r.move(driver.Write, l, there, driver.Desc{Len: 1 << 20})
	r.move(driver.Read, back, there, driver.Desc{Len: 1 << 20})
	r.same("what went to another process and came back", r.content(back), r.content(l))

	require.NoError(t, testkit.Freeze(owner))
	r.fill(l)
	r.move(driver.Write, l, there, driver.Desc{Len: 1 << 20}) // without its help
	r.b.cfg.DialTimeout = 300 * time.Millisecond              // nobody dials us
	_, _, err = one.Import(token)
	sameError(t, "import from a frozen process", err, driver.ErrTimeout)
	_, err = connect()
	sameError(t, "connect to a frozen process", err, driver.ErrTimeout)
	two := one.(*peer)
	select {
	case <-two.Lost():
		t.Error("a frozen process counts as lost")
	default:
	}
	require.NoError(t, owner.Kill())
	select {
	case <-two.Lost():
	case <-time.After(limit):
		t.Fatal("the death of an idle process is not noticed")
	}
	d := driver.Desc{Len: 8, LocalKey: l.m.key, RemoteKey: key}
	sameError(t, "submit to a dead process",
		two.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{d}}), driver.ErrPeerLost)
	_, _, err = two.Import(token)
	sameError(t, "import from a dead process", err, driver.ErrPeerLost)
	if _, err = connect(); err == nil {
		t.Error("connected to a dead process")
	}
	if err := two.Close(); err != nil {
		t.Error(err)
	}
}
