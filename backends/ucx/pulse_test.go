// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/session"
)

// silentLink is one over which nothing comes.
type silentLink struct {
	link
	heard, waited time.Duration
	givenUp       bool
}

func (l *silentLink) Silence() (heard, waited time.Duration) { return l.heard, l.waited }
func (l *silentLink) GiveUp()                                { l.givenUp = true }

// TestLook gives up a peer whose host is gone, and none whose process is slow.
func TestLook(t *testing.T) {
	const failure = 12 * time.Second
	at := netip.MustParseAddr("192.0.2.1")
	gone := map[netip.Addr]session.Outbound{at: {Unacked: true, SinceAck: time.Hour}}
	for name, c := range map[string]struct {
		hosts  map[netip.Addr]session.Outbound
		waits  bool // something waits for the peer
		near   bool // it is on this host
		pulses int  // after which it is given up; 0: never
	}{
		"gone":      {hosts: gone, waits: true, pulses: 15},
		"not there": {hosts: gone, pulses: 12*session.IdleFailures + 2},
		"unread": {hosts: map[netip.Addr]session.Outbound{at: {Pending: true, SinceAck: time.Hour}},
			waits: true},
		"answers": {hosts: map[netip.Addr]session.Outbound{at: {Unacked: true}}, waits: true},
		"not by TCP": {hosts: map[netip.Addr]session.Outbound{netip.IPv6Loopback(): {Unacked: true,
			SinceAck: time.Hour}}, waits: true, pulses: 12 * session.IdleFailures},
		"here": {hosts: gone, waits: true, near: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := &Backend{cfg: Config{Failure: failure}, ends: map[uint64]end{}}
			b.address.host = [8]byte{1}
			b.kernel = func() map[netip.Addr]session.Outbound { return c.hosts }
			l := &silentLink{}
			p := newPeer(b, address{hosts: []netip.Addr{at}})
			if c.near {
				p.owner.host = b.address.host
			}
			p.link = l
			p.linkUses.Reopen()
			b.add(7, p)
			watches, now := map[uint64]*session.SilenceWatch{}, int64(time.Hour)
			for i := 1; i < 100*pulses; i++ {
				l.heard += failure / pulses
				if c.waits {
					l.waited = l.heard
				}
				now += int64(failure / pulses)
				watches = b.giveUpGone(watches, now, false)
				if l.givenUp {
					require.Equal(t, c.pulses, i)
					return
				}
			}
			require.Zero(t, c.pulses, "never given up")
			if !c.near {
				b.kernel = func() map[netip.Addr]session.Outbound { return nil }
				l.heard, l.waited = 7*failure, 7*failure
				b.giveUpGone(map[uint64]*session.SilenceWatch{}, now, true)
				require.False(t, l.givenUp, "after this process stood still")
			}
			l.heard, l.waited = 0, 0
			require.Empty(t, b.giveUpGone(watches, now, false))
		})
	}
}
