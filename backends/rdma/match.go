// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/driver"
)

// pairing is a queue pair to be: a rail of ours with one of the owner's.
type pairing struct{ ours, theirs int }

// match chooses the queue pairs to an owner: each rail of ours that shares a subnet with one
// of the owner's, once, and the owner's rails in turn. Where no subnet is shared, those
// that a router may connect.
func match(ours, theirs []railAddress) ([]pairing, error) {
	for _, reaches := range []func(a, b *railAddress) bool{neighbours, routable} {
		if pairs := matchBy(ours, theirs, reaches); len(pairs) > 0 {
			return pairs, nil
		}
	}
	return nil, fmt.Errorf("no rail of ours (%s) reaches one of the peer's (%s): choose "+
		"Config.Devices and their GIDs in a common network: %w",
		listRails(ours), listRails(theirs), driver.ErrNoRoute)
}

func matchBy(ours, theirs []railAddress, reaches func(a, b *railAddress) bool) (pairs []pairing) {
	used := make([]int, len(theirs))
	for i := range ours {
		best := -1
		for j := range theirs {
			if reaches(&ours[i], &theirs[j]) &&
				(best < 0 || better(&ours[i], &theirs[j], used[j], &theirs[best], used[best])) {
				best = j
			}
		}
		if best >= 0 {
			used[best]++
			pairs = append(pairs, pairing{i, best})
		}
	}
	return pairs
}

// better prefers the rail that has fewer queue pairs, then our own, then one as fast as ours.
func better(our, a *railAddress, usedA int, b *railAddress, usedB int) bool {
	if usedA != usedB {
		return usedA < usedB
	}
	if own := a.gid == our.gid; own != (b.gid == our.gid) {
		return own
	}
	return a.rate == our.rate && b.rate != our.rate
}

// neighbours reports whether two rails share a subnet.
func neighbours(a, b *railAddress) bool {
	switch {
	case a.ethernet != b.ethernet:
		return false
	case !a.ethernet:
		return a.prefix() == b.prefix()
	case a.gid == b.gid:
		return true
	}
	return a.subnet().IsValid() && a.subnet() == b.subnet()
}

// routable reports whether a router may connect two rails: both have global addresses of
// RoCE v2, or both have addresses that stay on their segment, which may be the same one.
func routable(a, b *railAddress) bool {
	return a.ethernet && b.ethernet && family(a.ip()) == family(b.ip()) &&
		a.ip().IsLinkLocalUnicast() == b.ip().IsLinkLocalUnicast()
}

func listRails(rails []railAddress) string {
	var names []string
	for i := range rails {
		r := &rails[i]
		name := r.ip().String()
		if r.bits > 0 && r.ethernet {
			name += fmt.Sprintf("/%d", r.bits)
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}
