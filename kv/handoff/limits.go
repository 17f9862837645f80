// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/kv/layout"
)

// Limits bound what requests hold, and every wait. The zero value of a field means its default.
type Limits struct {
	Window      int // layers in flight of one request; default 4
	RequestsMax int // at once; default 256. A peer may begin twice as many requests with this rank
	MessageMax  int // bytes of a fragment of a long message; default 64 KiB, at least MessageMin

	// PlacesMax bounds the bytes of block tables and leases that the other group sends, of all
	// requests of this rank; default 256 MiB.
	PlacesMax int

	MeetTimeout   time.Duration // for all ranks to begin and open a request; default 30 s
	IdleTimeout   time.Duration // between two signs of life of the senders; default 60 s
	LayerTimeout  time.Duration // for one layer to be written or read; default 10 s
	TakenTimeout  time.Duration // from Finish until all receivers have confirmed; default 60 s
	RevokeTimeout time.Duration // to prove that leases have ended; default 15 s
	NotifyTimeout time.Duration // for a message to leave; default 5 s
}

// The largest values that fields of Limits may have.
const (
	requestsMax = 1 << 20
	messageMost = 1 << 30
	placesMost  = 1 << 40
)

func (l *Limits) ensureDefaults() {
	session.SetDefault(&l.Window, 4)
	session.SetDefault(&l.RequestsMax, 256)
	session.SetDefault(&l.MessageMax, 64<<10)
	session.SetDefault(&l.PlacesMax, 256<<20)
	session.SetDefault(&l.MeetTimeout, 30*time.Second)
	session.SetDefault(&l.IdleTimeout, 60*time.Second)
	session.SetDefault(&l.LayerTimeout, 10*time.Second)
	session.SetDefault(&l.TakenTimeout, 60*time.Second)
	session.SetDefault(&l.RevokeTimeout, 15*time.Second)
	session.SetDefault(&l.NotifyTimeout, 5*time.Second)
}

func (l *Limits) check(who string) error {
	if min(l.MeetTimeout, l.IdleTimeout, l.LayerTimeout, l.TakenTimeout, l.RevokeTimeout,
		l.NotifyTimeout) < 0 {
		return fmt.Errorf("%s: a negative timeout: %w", who, engine.ErrBounds)
	}
	return errors.Join(session.CheckWithin("Window", l.Window, 1, layout.LayersMax),
		session.CheckWithin("RequestsMax", l.RequestsMax, 1, requestsMax),
		session.CheckWithin("MessageMax", l.MessageMax, MessageMin, messageMost),
		session.CheckWithin("PlacesMax", l.PlacesMax, 1, placesMost))
}
