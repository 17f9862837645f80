// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// betweenHosts runs the test once more on a host of its own. There it returns the host at the
// other end of the cable; here it returns nil, when that is over.
func betweenHosts(t *testing.T, setUp ...func(*machine.Pair) error) *machine.Host {
	t.Helper()
	far, err := machine.BetweenHosts(t, setUp...)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	return far
}

// cable is two backends at the ends of a cable.
type cable struct {
	near        *Backend
	p           *peer
	descs       []driver.Desc
	local, away []byte
	m           *memory // away
}

func layCable(t *testing.T, far *machine.Host, cfg Config) *cable {
	t.Helper()
	const n = 32 << 20
	var owner *Backend
	cfg.Listen = ":0"
	require.NoError(t, far.Do(func() error { owner = open(t, cfg); return nil }))
	x := &cable{near: open(t, cfg)}
	m, away := share(t, owner, n)
	l, local := share(t, x.near, n)
	x.p = dial(t, x.near, owner.Addr())
	x.local, x.away, x.m = local, away, m
	x.descs = []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: importKey(t, x.p, m)}}
	return x
}

// plug runs ip in the near host, which is ours.
func plug(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

const cableDevice = "cable0" // as netns names it

// A cable that is out for a moment costs time, and nothing else.
func TestTimedCableOutForAMoment(t *testing.T) {
	far := betweenHosts(t)
	if far == nil {
		return
	}
	x := layCable(t, far, Config{})
	for i, op := range []driver.Op{driver.Write, driver.Read} {
		fill(x.local, byte(3+i))
		if op == driver.Read {
			fill(x.away, 9)
		}
		require.NoError(t, x.p.Submit(1, &driver.Batch{Op: op, Descs: x.descs}))
		plug(t, "link", "set", cableDevice, "down")
		time.Sleep(500 * time.Millisecond) // longer than Grace
		plug(t, "link", "set", cableDevice, "up")
		if err := await(t, x.near, 1); err != nil {
			t.Errorf("%v over a cable that was out for a moment: %v", op, err)
		}
		if !bytes.Equal(x.local, x.away) {
			testkit.ErrorBroken(t,
				"%v over a cable that was out for a moment: the bytes differ", op)
		}
	}
}

// A cable that stays out, and a host whose address is gone, end what is in flight.
func TestTimedCableOutForGood(t *testing.T) {
	far := betweenHosts(t)
	if far == nil {
		return
	}
	for _, how := range [][]string{
		{"address", "flush", "dev", cableDevice},
		{"link", "set", cableDevice, "down"},
	} {
		x := layCable(t, far, Config{Failure: time.Second})
		x.m.gate.Lock() // nothing lands: most is on its way when the cable goes
		for tag := range uint64(20) {
			require.NoError(t, x.p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: x.descs}))
		}
		plug(t, how...)
		wantError(t, strings.Join(how, " "), await(t, x.near, 19), driver.ErrPeerLost)
		select {
		case <-x.p.Lost():
		case <-time.After(limit):
			t.Errorf("%v: the peer is not lost", how)
		}
		x.m.gate.Unlock()
		plug(t, "address", "replace", "192.0.2.1/30", "dev", cableDevice)
		plug(t, "link", "set", cableDevice, "up")
	}
}
