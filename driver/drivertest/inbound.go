// SPDX-License-Identifier: Apache-2.0

package drivertest

import "github.com/sluicehq/sluice/driver"

var inboundChecks = []check{
	{name: "Inbound", wirings: everywhere, needs: driver.CanNotify, run: checkInbound},
}

// inbound is what Backend.Inbound returns.
type inbound struct {
	Written, Read uint64
	Counted       bool
}

// checkInbound moves bytes over two connections, and asks the owner what came by each. The
// counts are there once the initiator knows of the end.
func checkInbound(s *stage) {
	other, err := s.near.connect(s.farAddr, s.h.Limit)
	s.ok(err, "connect again")
	conn, silent := s.connOf(s.peerID), s.connOf(other)
	const n = 300 << 10
	l, r := s.local(n), s.remote(n)
	l.paint(s.seed())
	var want inbound
	for _, length := range []uint64{1, 656, 5000, n} {
		for _, op := range []driver.Op{driver.Write, driver.Read} {
			s.move(op, s.pieces(desc(l, 0, r, 0, length))...)
			if op == driver.Write {
				want.Written += length
			} else {
				want.Read += length
			}
			s.inboundIs(conn, want)
		}
	}
	s.inboundIs(silent, inbound{})
	if got := s.far.must(request{Do: "inbound", Conn: 1 << 60}).Inbound; *got != (inbound{}) {
		s.Errorf("a connection that never was: %+v", *got)
	}
}

// inboundIs wants these counts, or none of a backend that says that it has none.
func (s *stage) inboundIs(conn uint64, want inbound) {
	s.Helper()
	got := s.far.must(request{Do: "inbound", Conn: conn}).Inbound
	if want.Counted = got.Counted; !got.Counted {
		want = inbound{}
	}
	if *got != want {
		s.Errorf("the owner has counted %+v, want %+v", *got, want)
	}
}
