// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// mute is a Shared that lends nothing more once its memory is registered, until it is freed.
type mute struct {
	driver.Shared
	lent  bool
	freed chan struct{}
}

func (m *mute) Lend(f func([]driver.Extent) error) error {
	if m.lent {
		<-m.freed
		return driver.ErrClosed
	}
	m.lent = true
	return m.Shared.Lend(f)
}

// An owner that answers a part at a time, and never ends, stretches no import: its limit
// counts for the whole answer.
func TestImportEndsThoughTheOwnerAlwaysAddsAPart(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := open(t, Config{}), openBy(t, clock, Config{})
	buf, _ := shared(t, owner, 4096, 1)
	seg := buf.Segment()
	quiet := &mute{Shared: seg.Shared, freed: make(chan struct{})}
	seg.Shared, seg.Secret[0] = quiet, 2
	far, err := owner.Register(seg)
	require.NoError(t, err)
	defer close(quiet.freed)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	p := dial(t, b, owner.Addr())
	list := *owner.inbound.Load()
	ours := list[len(list)-1]
	ended := make(chan error, 1)
	go func() {
		_, _, err := p.Import(token)
		ended <- err
	}()
	soon(t, "the question", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.fetchID == 1
	})
	part := binary.LittleEndian.AppendUint64(answerHead(0, statusOK), 1)
	part = binary.LittleEndian.AppendUint64(part, 4096)
	part = binary.LittleEndian.AppendUint32(part, extentsMax)
	part = binary.LittleEndian.AppendUint32(part, 1)
	part = append(part, make([]byte, extentBytes)...)
	for end := time.Now().Add(limit); time.Now().Before(end); {
		require.NoError(t, ours.say(part, nil))
		select {
		case err := <-ended:
			require.ErrorIs(t, err, driver.ErrTimeout)
			return
		case <-time.After(10 * time.Millisecond):
			clock.Advance(b.cfg.DialTimeout / 8)
		}
	}
	t.Error("the import goes on for as long as parts come")
}
