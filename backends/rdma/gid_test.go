// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// gid makes one of RoCE; a subnet is that of its network device.
func gid(index int, address, kind string, bits int) GID {
	a := netip.MustParseAddr(address)
	g := GID{Index: index, Address: netip.AddrFrom16(a.As16()), Type: kind, NetDev: "eth0"}
	if bits > 0 {
		g.Subnet = netip.PrefixFrom(a, bits)
	}
	return g
}

func TestGIDRule(t *testing.T) {
	const v1, v2 = "IB/RoCE v1", "RoCE v2"
	for name, c := range map[string]struct {
		gids []GID
		want int // -1: none
		why  string
	}{
		"as a NIC has them": {[]GID{gid(0, "fe80::1", v1, 0), gid(1, "fe80::1", v2, 64),
			gid(2, "10.0.0.1", v1, 24), gid(3, "10.0.0.1", v2, 24)}, 3, "RoCE v2"},
		"as rxe has them": {[]GID{gid(0, "fe80::1", v2, 64), gid(1, "10.0.0.1", v2, 24)}, 1,
			"RoCE v2"},
		"IPv6 alone": {[]GID{gid(0, "fe80::1", v2, 64), gid(4, "fd00::1", v2, 64)}, 4,
			"RoCE v2"},
		"IPv4 before IPv6": {[]GID{gid(2, "fd00::1", v2, 64), gid(5, "10.0.0.1", v2, 24)}, 5,
			"RoCE v2"},
		"the lowest": {[]GID{gid(7, "10.1.0.1", v2, 24), gid(5, "10.0.0.1", v2, 24)}, 5, "RoCE v2"},
		"one that routes before one that is left over": {[]GID{gid(1, "10.9.9.9", v2, 0),
			gid(6, "10.0.0.1", v2, 24)}, 6, "on the network"},
		"one that is left over before link-local": {[]GID{gid(1, "fe80::1", v2, 64),
			gid(6, "10.0.0.1", v2, 0)}, 6, "no such address"},
		"link-local before v1": {[]GID{gid(0, "10.0.0.1", v1, 24), gid(1, "fe80::1", v2, 64)},
			1, "nothing better"},
		"v1 when it is all there is": {[]GID{gid(0, "fe80::1", v1, 64)}, 0, "nothing better"},
		"none of RoCE":               {[]GID{gid(0, "fe80::1", "something", 64)}, -1, ""},
		"none":                       {nil, -1, ""},
	} {
		p := Port{Number: 1, LinkLayer: "Ethernet", GIDs: c.gids}
		got, choices, err := chooseGID(&p, -1)
		if c.want < 0 {
			if !errors.Is(err, driver.ErrNoRoute) {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
			continue
		}
		if err != nil || got.Index != c.want || len(choices) != len(c.gids) {
			t.Errorf("%s: index %d, %v, want %d", name, got.Index, err, c.want)
		}
		for _, choice := range choices {
			if choice.Why == "" || choice.Chosen != (choice.Index == c.want) || choice.Chosen &&
				!strings.Contains(choice.Why, c.why) {
				t.Errorf("%s: index %d, chosen %v: %q", name, choice.Index, choice.Chosen,
					choice.Why)
			}
		}
	}
}

func TestGIDOfInfiniBand(t *testing.T) {
	p := Port{Number: 1, LinkLayer: "InfiniBand", GIDs: []GID{gid(0, "fe80::1", "IB/RoCE v1", 0),
		gid(1, "fd00::1", "IB/RoCE v1", 0)}}
	if got, _, err := chooseGID(&p, -1); err != nil || got.Index != 0 {
		t.Errorf("index %d, %v", got.Index, err)
	}
	if got, choices, err := chooseGID(&p, 1); err != nil || got.Index != 1 || !choices[1].Chosen {
		t.Errorf("by name: index %d, %v", got.Index, err)
	}
	if _, _, err := chooseGID(&p, 9); !errors.Is(err, driver.ErrNoRoute) {
		t.Errorf("one that is not there: %v", err)
	}
	p.GIDs = p.GIDs[1:]
	if _, _, err := chooseGID(&p, -1); !errors.Is(err, driver.ErrNoRoute) {
		t.Errorf("without index 0: %v", err)
	}
}

func railIn(address string, bits uint8, ethernet bool) railAddress {
	return railAddress{gid: netip.MustParseAddr(address).As16(), bits: bits, ethernet: ethernet,
		rate: 100000}
}

func TestMatch(t *testing.T) {
	a0, a1 := railIn("10.0.0.1", 24, true), railIn("10.0.1.1", 24, true)
	b0, b1 := railIn("10.0.0.2", 24, true), railIn("10.0.1.2", 24, true)
	fast := railIn("10.0.0.3", 24, true)
	fast.rate = 400000
	fastA := a0
	fastA.rate = 400000
	ib0, ib1, other := railIn("fe80::1", 0, false), railIn("fe80::2", 0, false),
		railIn("fe80:0:0:1::1", 0, false)
	far, local6, global6 := railIn("10.9.0.1", 24, true), railIn("fe80::7", 0, true),
		railIn("fd00::7", 64, true)
	for name, c := range map[string]struct {
		ours, theirs []railAddress
		want         []pairing
	}{
		"one each": {[]railAddress{a0}, []railAddress{b0}, []pairing{{0, 0}}},
		"by subnet": {[]railAddress{a0, a1}, []railAddress{b1, b0},
			[]pairing{{0, 1}, {1, 0}}},
		"ours with itself": {[]railAddress{a0, b0}, []railAddress{a0, b0},
			[]pairing{{0, 0}, {1, 1}}},
		"the peer's rails in turn": {[]railAddress{a0, fast},
			[]railAddress{b0, railIn("10.0.0.9", 24, true)}, []pairing{{0, 0}, {1, 1}}},
		"as fast as ours": {[]railAddress{fastA}, []railAddress{b0, fast},
			[]pairing{{0, 1}}},
		"more of ours": {[]railAddress{a0, fast}, []railAddress{b0},
			[]pairing{{0, 0}, {1, 0}}},
		"no route beside a subnet": {[]railAddress{a0, far}, []railAddress{b0}, []pairing{{0, 0}}},
		"routed when it is all":    {[]railAddress{a0}, []railAddress{far}, []pairing{{0, 0}}},
		"InfiniBand": {[]railAddress{ib0}, []railAddress{other, ib1},
			[]pairing{{0, 1}}},
		"another InfiniBand subnet": {[]railAddress{ib0}, []railAddress{other}, nil},
		"another kind":              {[]railAddress{ib0}, []railAddress{local6}, nil},
		"another family":            {[]railAddress{a0}, []railAddress{global6}, nil},
		"link-local to global":      {[]railAddress{local6}, []railAddress{global6}, nil},
	} {
		got, err := match(c.ours, c.theirs)
		same := len(got) == len(c.want)
		for i := range got {
			same = same && got[i] == c.want[i]
		}
		if !same || (err == nil) != (c.want != nil) || err != nil &&
			!errors.Is(err, driver.ErrNoRoute) {
			t.Errorf("%s: %v, %v, want %v", name, got, err, c.want)
		}
	}
}
