// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"crypto/rand"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// revokedPlaces are those of a request whose rank has revoked its lease since.
func revokedPlaces(t *testing.T, m *member, tables layout.Tables) places {
	t.Helper()
	l, err := m.regions[0].Lease(0, m.regions[0].Size(), engine.LeaseOptions{})
	require.NoError(t, err)
	p := placesOf(tables, []groupLease{{part{0, 0, 3}, l}})
	require.NoError(t, l.Revoke(within(t)))
	return p
}

// TestGroupLeaseRevokedBeforeItsImport: another rank ends a request while this one imports the
// lease of a third. That is an end like any other, and not a failure of this rank.
func TestGroupLeaseRevokedBeforeItsImport(t *testing.T) {
	over(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
		for _, pull := range []bool{false, true} {
			s := fourToTwo(t, open, pull)
			edge := s.config
			s.config = func(sends bool, g *GroupConfig) {
				edge(sends, g)
				g.NotifyTimeout = 50 * time.Millisecond // the third rank says nothing here
			}
			c := newCrowd(t, s)
			j := &job{c: c, number: 1, span: layout.Span{To: 40}}
			from, to := c.from[0].tables(t, 40), c.to[0].tables(t, 40)
			var err error
			if pull {
				err = j.importByReceiver(t, from, to)
				require.ErrorIs(t, err, engine.ErrAborted)
			} else {
				err = j.importBySender(t, from, to)
				require.ErrorIs(t, err, ErrCancelled)
			}
			var end *EndError
			require.ErrorAs(t, err, &end)
			require.True(t, end.Remote)
		}
	})
}

func (j *job) importBySender(t *testing.T, from, to layout.Tables) error {
	t.Helper()
	m := j.c.from[0]
	granted := revokedPlaces(t, j.c.to[0], to)
	ended := make(chan error, 1)
	go func() {
		_, err := m.sender.Begin(within(t), j.number, from, j.span)
		ended <- err
	}()
	await(t, "the request begins", func() bool { return len(m.sender.all()) == 1 })
	b := granted.append(nil)
	push := m.sender.all()[0]
	push.receive(push.links[0], &message{kind: kindGrant, total: uint32(len(b)), bytes: b})
	return <-ended
}

func (j *job) importByReceiver(t *testing.T, from, to layout.Tables) error {
	t.Helper()
	r := j.c.to[0].receive
	ask := groupBegin{request: j.number, plan: r.plan, op: engine.Read, span: j.span,
		places: revokedPlaces(t, j.c.from[0], from)}
	rand.Read(ask.seed[:])
	b := ask.append(nil)
	msg := appendHeader(nil, toGroupReceiver, kindBegin, 0, 77)
	msg = append(msg, byte(len(b)), byte(len(b)>>8), 0, 0, 0, 0, 0, 0)
	r.receive(engine.Notification{Peer: r.cfg.Peers[0], Data: append(msg, b...)})
	q, err := r.Open(within(t), j.number, to, j.span)
	if err != nil {
		return err
	}
	<-q.Done()
	return q.Err()
}
