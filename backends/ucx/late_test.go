// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const lateBytes = 4096

// shortGrace makes the tests of silence quick.
const shortGrace = 600 * time.Millisecond

// TestTimedPausesLoseNothing stops a peer, for longer than Grace and Failure, while writes to it
// wait. Its host answers, so it is not given up; when it goes on it asks whether the bytes are
// still wanted, and lands them.
func TestTimedPausesLoseNothing(t *testing.T) {
	t.Parallel()
	o := startOwner(t, onLoopback(Config{Grace: shortGrace, Failure: shortGrace}),
		onLoopback(Config{Grace: shortGrace}), (*exec.Cmd).Start)
	p, key := o.connect()
	for range 2 {
		o.freeze()
		o.write(p, key, 0, lateBytes)
		select {
		case <-p.Lost():
			t.Fatal("a peer was given up whose host answers")
		case <-time.After(4 * shortGrace):
		}
		o.thaw()
		require.NoError(t, o.outcome())
		require.Equal(t, lateBytes, o.landed())
	}
	require.NoError(t, p.Close())
}

// TestTimedNothingLandsAfterAForcedClose closes the connection to a peer that is stopped with bytes
// in its queue, with a Grace of its own that is equal, longer or shorter.
func TestTimedNothingLandsAfterAForcedClose(t *testing.T) {
	for name, grace := range map[string]time.Duration{"equal": shortGrace, "longer": 4 * shortGrace,
		"shorter": shortGrace / 4} {
		t.Run(name, func(t *testing.T) {
			o := startOwner(t, onLoopback(Config{Grace: shortGrace}),
				onLoopback(Config{Grace: grace}), (*exec.Cmd).Start)
			p, key := o.connect()
			o.freeze()
			o.write(p, key, 0, lateBytes)
			require.NoError(t, p.Close())
			require.ErrorIs(t, o.outcome(), driver.ErrClosed)
			o.thaw()
			o.settle(2 * lateBytes)
			o.keeps(1, "bytes of a batch that had ended landed")
		})
	}
}

// breakConnections ends all TCP connections of this process that lead to a port, as a reset does.
func breakConnections(t *testing.T) (n int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, f := range list {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		if _, err := unix.Getpeername(fd); err != nil {
			continue
		}
		domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err == nil && domain == unix.AF_INET && unix.Shutdown(fd, unix.SHUT_RDWR) == nil {
			n++
		}
	}
	return n
}

// TestTimedNothingLandsAfterAReset breaks our own sockets while the peer is stopped with bytes in
// its queue, for less than Grace: that we lost it says nothing of what it lands.
func TestTimedNothingLandsAfterAReset(t *testing.T) {
	o := startOwner(t, onLoopback(Config{Grace: shortGrace}),
		onLoopback(Config{Grace: shortGrace}), (*exec.Cmd).Start)
	p, key := o.connect()
	o.freeze()
	o.write(p, key, 0, lateBytes)
	require.Positive(t, breakConnections(t))
	<-p.Lost()
	require.ErrorIs(t, o.outcome(), driver.ErrPeerLost)
	o.thaw()
	o.settle(2 * lateBytes)
	o.keeps(1, "bytes of a batch that had ended landed")
	require.NoError(t, p.Close())
}

// slowLoopback makes the loopback device of the host that a test runs on slow: 1 MiB takes 16 s.
func slowLoopback(do string) error {
	for _, line := range []string{"ip link set lo mtu 1500", // a burst is more than a packet
		"tc qdisc " + do + " dev lo root tbf rate 500kbit burst 32kb limit 10mb"} {
		args := strings.Fields(line)
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return &driver.UnavailableError{Backend: "tbf", Fix: "modprobe sch_tbf, or make guest",
				Reason: fmt.Sprintf("%s %v", strings.TrimSpace(string(out)), err)}
		}
	}
	return nil
}

// TestTimedNothingLandsAfterACloseOverASlowLink closes a connection while most of a write is
// still in the sockets: what has not landed by then does not land.
func TestTimedNothingLandsAfterACloseOverASlowLink(t *testing.T) {
	far, err := machine.BetweenHosts(t, func(p *machine.Pair) error {
		b, err := New(Config{Transports: "tcp", Devices: "lo"})
		if err != nil {
			return err
		}
		return p.Near.Do(func() error {
			err := slowLoopback("add")
			if err == nil {
				err = slowLoopback("del")
			}
			return errors.Join(err, b.Close())
		})
	})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	if far == nil {
		return
	}
	// Bytes land while what the writer last heard of the owner is younger than Grace: the first
	// ones are half a second on the link, and a busy machine takes its time before and after.
	const grace = 3 * shortGrace
	o := startOwner(t, onLoopback(Config{Grace: grace}), onLoopback(Config{Grace: grace}),
		(*exec.Cmd).Start)
	p, key := o.connect()
	require.NoError(t, slowLoopback("add"))
	o.write(p, key, 0, 1)
	require.NoError(t, o.outcome())
	o.write(p, key, 1, ownerBytes-1)
	eventually(t, "the first bytes land", func() bool { return o.landed() > 1 })
	require.NoError(t, p.Close())
	require.ErrorIs(t, o.outcome(), driver.ErrClosed)
	landed := o.landed()
	require.Less(t, landed, ownerBytes, "the link was not slow")
	require.NoError(t, slowLoopback("del"))
	time.Sleep(3 * time.Second) // all that was in the sockets has come by then
	o.keeps(landed, "bytes landed after Close")
}

// TestPagesThatDoNotCome writes from memory whose pages do not come, as those of a file on a server
// that is gone: that holds up the writer, and neither the owner nor its fence. What comes later
// does not land.
func TestPagesThatDoNotCome(t *testing.T) {
	testkit.CheckLeaks(t)
	o := startOwner(t, onLoopback(Config{}), onLoopback(Config{Grace: graceMax}), (*exec.Cmd).Start)
	p, key := o.connect()
	o.write(p, key, 0, ownerBytes)
	require.NoError(t, o.outcome())
	require.Equal(t, ownerBytes, o.landed())

	mem, err := unix.Mmap(-1, 0, 128<<10, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	late, err := testkit.WithholdPages(mem)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	m, err := o.b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem,
		Secret: [16]byte{3}})
	require.NoError(t, err)
	o.tag++
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(o.tag, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{
			Len: uint64(len(mem)), LocalKey: m.Key(), RemoteKey: key}}})
	}()
	defer late.Supply(t)
	late.Await(t)
	o.fence()
	late.Supply(t)
	require.NoError(t, <-submitted)
	require.Error(t, o.outcome())
	o.fence() // the owner has handled what came before
	o.keeps(ownerBytes, "zeros landed behind the fence")
	require.NoError(t, m.Revoke(t.Context()))
	require.NoError(t, p.Close())
}
