// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// UCXOffer is what a UCXLoop needs to reach the memory of another.
type UCXOffer struct {
	Address []byte `json:"address"`
	Rkey    []byte `json:"rkey"`
	Base    uint64 `json:"base"`
	Len     uint64 `json:"len"`
}

// UCXBatch is a list of descriptors that a UCXLoop has checked, once: the loop
// itself is to cost nothing but the calls of UCX.
type UCXBatch struct {
	descs  []driver.Desc
	loop   *UCXLoop
	window int
}

// newUCXBatch checks that each piece is within two memories of that many bytes. At
// most window pieces will be under way at once.
func newUCXBatch(l *UCXLoop, descs []driver.Desc, window int, local, remote uint64) (*UCXBatch,
	error) {
	if len(descs) == 0 || window < 1 {
		return nil, fmt.Errorf("%d pieces, %d at once: %w", len(descs), window, driver.ErrBounds)
	}
	for i, d := range descs {
		if d.Local > local || d.Len > local-d.Local || d.Remote > remote ||
			d.Len > remote-d.Remote {
			return nil, &driver.PieceError{Piece: i, Err: driver.ErrBounds}
		}
	}
	return &UCXBatch{descs: descs, loop: l, window: window}, nil
}
