// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/netns"
)

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
	far, err := netns.BetweenHosts(t, func(p *netns.Pair) error {
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
	o := startOwner(t, Config{Grace: grace}, grace)
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
