// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// GIDChoice is what the rule says of one GID.
type GIDChoice struct {
	GID
	Chosen bool
	Why    string // why it is, or is not, the one
}

// The rule of GIDs. InfiniBand has one that is always right: index 0. With RoCE each port
// has several, of which most do not reach a peer: v1 stays in its Ethernet segment, and
// a link-local address is on every network and on none. So: v2 with an address that its
// network device has; then v2 with any other global address; what is left only when
// there is nothing else. IPv4 goes before IPv6, then the lowest index.
const (
	gidRouted = iota
	gidGlobal
	gidLinkLocal
	gidSegment
	gidNone
)

var gidReasons = [...]string{
	gidRouted:    "RoCE v2, on the network of its device",
	gidGlobal:    "RoCE v2, but its network device has no such address",
	gidLinkLocal: "link-local: on every network, so it does not say which host is reached",
	gidSegment:   "RoCE v1: does not leave its Ethernet segment",
	gidNone:      "no RoCE address",
}

// rankGID tells how good a GID of RoCE is; less is better.
func rankGID(g *GID) int {
	v1 := g.Type == "IB/RoCE v1"
	switch {
	case !v1 && g.Type != "RoCE v2":
		return gidNone
	case v1:
		return gidSegment
	case g.Address.Unmap().IsLinkLocalUnicast():
		return gidLinkLocal
	case g.Subnet.IsValid():
		return gidRouted
	}
	return gidGlobal
}

// chooseGID applies the rule to a port; override names an index, unless it is negative. An
// error says that there is none.
func chooseGID(p *Port, override int) (GID, []GIDChoice, error) {
	choices := make([]GIDChoice, len(p.GIDs))
	order := make([]int, len(p.GIDs))
	for i := range p.GIDs {
		choices[i], order[i] = GIDChoice{GID: p.GIDs[i]}, i
	}
	if len(choices) == 0 {
		return GID{}, nil, fmt.Errorf("port %d has no GID: give its network device an address: %w",
			p.Number, driver.ErrNoRoute)
	}
	if override >= 0 {
		return overrideGID(p, override, choices)
	}
	if !p.Ethernet() {
		return infinibandGID(p, choices)
	}
	slices.SortStableFunc(order, func(a, b int) int {
		x, y := &p.GIDs[a], &p.GIDs[b]
		return cmp.Or(cmp.Compare(rankGID(x), rankGID(y)), cmp.Compare(family(x.Address),
			family(y.Address)), cmp.Compare(x.Index, y.Index))
	})
	best := order[0]
	if rankGID(&p.GIDs[best]) == gidNone {
		return GID{}, choices, fmt.Errorf("port %d has no GID of RoCE: %w", p.Number,
			driver.ErrNoRoute)
	}
	for i := range choices {
		choices[i].Why = rejection(&p.GIDs[i], &p.GIDs[best])
	}
	choices[best].Chosen = true
	return p.GIDs[best], choices, nil
}

// rejection says why one GID was not taken, or why it was.
func rejection(g, best *GID) string {
	why := gidReasons[rankGID(g)]
	switch {
	case g.Index == best.Index && rankGID(g) >= gidLinkLocal:
		return why + "; taken because the port has nothing better"
	case g.Index == best.Index || rankGID(g) != rankGID(best):
		return why
	case family(g.Address) != family(best.Address):
		return why + fmt.Sprintf("; as good as index %d, but IPv4 goes first", best.Index)
	}
	return why + fmt.Sprintf("; as good as index %d, which comes first", best.Index)
}

func overrideGID(p *Port, index int, choices []GIDChoice) (GID, []GIDChoice, error) {
	at := slices.IndexFunc(p.GIDs, func(g GID) bool { return g.Index == index })
	for i := range choices {
		choices[i].Why = fmt.Sprintf("Config.Devices names index %d", index)
	}
	if at < 0 {
		return GID{}, choices, fmt.Errorf("port %d has no GID of index %d, which "+
			"Config.Devices names: %w", p.Number, index, driver.ErrNoRoute)
	}
	choices[at].Chosen = true
	return p.GIDs[at], choices, nil
}

func infinibandGID(p *Port, choices []GIDChoice) (GID, []GIDChoice, error) {
	for i := range choices {
		choices[i].Why = "InfiniBand: index 0 is the port's own"
	}
	if p.GIDs[0].Index != 0 {
		return GID{}, choices, fmt.Errorf("port %d has no GID of index 0: is a subnet manager "+
			"running?: %w", p.Number, driver.ErrNoRoute)
	}
	choices[0].Chosen = true
	return p.GIDs[0], choices, nil
}

// family is 4 or 6.
func family(a netip.Addr) int {
	if a.Unmap().Is4() {
		return 4
	}
	return 6
}
