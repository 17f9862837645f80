// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// wanted is an entry of Config.Devices.
type wanted struct {
	device string
	port   int // 0: every active one
	gid    int // index in the port's GID table; -1: chooseGID decides
}

// splitDevices parses a list such as "mlx5_0,mlx5_1:1,mlx5_2:1#3". It returns nil for "".
func splitDevices(list string) (all []wanted, err error) {
	if list == "" {
		return nil, nil
	}
	for entry := range strings.SplitSeq(list, ",") {
		w, ok := readWanted(entry)
		if !ok {
			return nil, fmt.Errorf("config: Devices has %q, want DEVICE, DEVICE:PORT or "+
				"DEVICE:PORT#GID as in mlx5_0:1#3: %w", entry, driver.ErrBounds)
		}
		for _, other := range all {
			if other == w {
				return nil, fmt.Errorf("config: Devices has %q twice: %w", entry, driver.ErrBounds)
			}
		}
		all = append(all, w)
	}
	return all, nil
}

func readWanted(entry string) (w wanted, ok bool) {
	w.gid = -1
	name, rest, ported := strings.Cut(entry, ":")
	port, gid, chosen := strings.Cut(rest, "#")
	w.device = name
	if name == "" || strings.ContainsAny(name, "/#. \t") {
		return w, false
	}
	if ported {
		n, err := strconv.ParseUint(port, 10, 8)
		if err != nil || n == 0 {
			return w, false
		}
		w.port = int(n)
	}
	if chosen {
		n, err := strconv.ParseUint(gid, 10, 8)
		if err != nil {
			return w, false
		}
		w.gid = int(n)
	}
	return w, true
}

// names reports whether the entry selects port p of device d.
func (w *wanted) names(d *Device, p *Port) bool {
	return w.device == d.Name && (w.port == 0 || w.port == p.Number)
}

// String returns the entry as it is written in Config.Devices.
func (w wanted) String() string {
	s := w.device
	if w.port > 0 {
		s += ":" + strconv.Itoa(w.port)
	}
	if w.gid >= 0 {
		s += "#" + strconv.Itoa(w.gid)
	}
	return s
}

// Device is an RDMA device as sysfs describes it.
type Device struct {
	Name  string
	Node  int      // NUMA node; -1: unknown, or the machine has one node
	Path  []string // PCI addresses from the root to the device; empty: not a PCI device
	Ports []Port
}

// Port is one port of a Device.
type Port struct {
	Number    int
	State     string  // "ACTIVE", "DOWN", "INIT", "ARMED"
	Physical  string  // "LinkUp", "Disabled", "Polling"
	LinkLayer string  // "Ethernet", "InfiniBand"
	RateText  string  // "100 Gb/sec (4X EDR)"
	Rate      float64 // bytes a second; 0: not known
	LID       uint16
	GIDs      []GID // the entries of the GID table that are not zero
}

// GID is one address of a Port.
type GID struct {
	Index   int
	Address netip.Addr   // IPv6 form, IPv4 within it for RoCE over IPv4
	Type    string       // "RoCE v2", "IB/RoCE v1"
	NetDev  string       // the network device of a RoCE address; empty: none
	Subnet  netip.Prefix // of Address on NetDev; invalid when NetDev does not have Address
}

// Active reports whether the port can carry data.
func (p *Port) Active() bool { return p.State == "ACTIVE" }

// Ethernet reports whether the port speaks RoCE.
func (p *Port) Ethernet() bool { return p.LinkLayer == "Ethernet" }

// sysfs reads RDMA devices from sysfs, and network devices from the kernel's interface list. Tests
// replace all three fields.
type sysfs struct {
	root     string                                 // "/sys"
	prefixes func(netdev string) []netip.Prefix     // addresses with their subnets
	state    func(netdev string) (up bool, mtu int) // link state
}

var thisMachine = &sysfs{root: "/sys", prefixes: prefixesOf, state: stateOf}

func prefixesOf(netdev string) (list []netip.Prefix) {
	i, err := net.InterfaceByName(netdev)
	if err != nil {
		return nil
	}
	addresses, err := i.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			list = append(list, p)
		}
	}
	return list
}

func stateOf(netdev string) (up bool, mtu int) {
	i, err := net.InterfaceByName(netdev)
	if err != nil {
		return false, 0
	}
	return i.Flags&net.FlagUp != 0, i.MTU
}

func (s *sysfs) text(path ...string) string   { return topology.Sysfs(s.root).Text(path...) }
func (s *sysfs) there(path ...string) bool    { return topology.Sysfs(s.root).There(path...) }
func (s *sysfs) list(path ...string) []string { return topology.Sysfs(s.root).List(path...) }

const class = "class/infiniband"

// gidGap is the number of consecutive empty GID entries after which gids stops. A table may have a
// thousand entries, each of three files, and the kernel always fills the first free entry.
const gidGap = 64

// devices returns all RDMA devices, sorted by name.
func (s *sysfs) devices() (all []Device) {
	for _, name := range s.list(class) {
		kernel := topology.Sysfs(s.root)
		d := Device{Name: name, Node: kernel.Node(class, name, "device"),
			Path: kernel.Path(class, name, "device")}
		for _, port := range s.list(class, name, "ports") {
			if number, err := strconv.Atoi(port); err == nil {
				d.Ports = append(d.Ports, s.port(name, number))
			}
		}
		s.locateByParent(&d)
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// locateByParent sets the NUMA node and PCI path of a device that has neither, such as a soft-RoCE
// device, from the network device below it.
func (s *sysfs) locateByParent(d *Device) {
	if d.Node >= 0 || len(d.Path) > 0 {
		return
	}
	netdev := s.text(class, d.Name, "parent")
	if netdev == "" {
		return
	}
	kernel := topology.Sysfs(s.root)
	d.Node, d.Path = kernel.Node("class/net", netdev, "device"), kernel.Path("class/net", netdev,
		"device")
}

func (s *sysfs) port(device string, number int) Port {
	at := filepath.Join(class, device, "ports", strconv.Itoa(number))
	p := Port{
		Number: number, State: afterColon(s.text(at, "state")),
		Physical:  afterColon(s.text(at, "phys_state")),
		LinkLayer: s.text(at, "link_layer"), RateText: s.text(at, "rate"),
	}
	p.Rate = rateOf(p.RateText)
	if lid, err := strconv.ParseUint(s.text(at, "lid"), 0, 16); err == nil {
		p.LID = uint16(lid)
	}
	p.GIDs = s.gids(at)
	return p
}

// gids returns the GIDs of a port that are not zero. at is the port's directory.
func (s *sysfs) gids(at string) (list []GID) {
	gap := 0
	for _, name := range s.list(at, "gids") {
		index, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if gap++; gap > gidGap {
			break
		}
		address, err := netip.ParseAddr(s.text(at, "gids", name))
		if err != nil || address == netip.IPv6Unspecified() {
			continue
		}
		gap = 0
		g := GID{Index: index, Address: address, Type: s.text(at, "gid_attrs/types", name),
			NetDev: s.text(at, "gid_attrs/ndevs", name)}
		g.Subnet = s.subnet(&g)
		list = append(list, g)
	}
	return list
}

// subnet returns the subnet of a GID's address on its network device. The result is invalid when
// the network device does not have the address.
func (s *sysfs) subnet(g *GID) netip.Prefix {
	if g.NetDev == "" {
		return netip.Prefix{}
	}
	for _, p := range s.prefixes(g.NetDev) {
		if p.Addr().Unmap() == g.Address.Unmap() {
			return netip.PrefixFrom(p.Addr().Unmap(), p.Bits())
		}
	}
	return netip.Prefix{}
}

// afterColon returns "ACTIVE" for "4: ACTIVE".
func afterColon(s string) string {
	if _, word, ok := strings.Cut(s, ":"); ok {
		return strings.TrimSpace(word)
	}
	return s
}

// rateOf converts a rate such as "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)" to bytes a second.
// It returns 0 for any other text.
func rateOf(text string) float64 {
	number, unit, _ := strings.Cut(text, " ")
	gigabits, err := strconv.ParseFloat(number, 64)
	if err != nil || !strings.HasPrefix(unit, "Gb/sec") || gigabits < 0 {
		return 0
	}
	return gigabits * 1e9 / 8
}

// GIDChoice is a GID of a port, and whether the backend uses it.
type GIDChoice struct {
	GID
	Chosen bool
	Why    string // the reason that it was chosen or passed over
}

// Ranks of the GIDs of a RoCE port, best first. (An InfiniBand port always uses index 0.)
//
// A RoCE port has several GIDs, and most of them do not reach a peer on another network: RoCE v1
// frames stay in their Ethernet segment, and a link-local address exists on every network. Among
// GIDs of one rank, IPv4 is preferred to IPv6, and then the lowest index.
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

// rankGID returns the rank of a RoCE port's GID; lower is better.
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

// chooseGID chooses the GID that a port uses, and explains the choice for each of its GIDs. If
// override is not negative, it is the index to use. chooseGID fails when no GID is usable.
func chooseGID(p *Port, override int) (GID, []GIDChoice, error) {
	none := func(format string, args ...any) error {
		return fmt.Errorf("port %d has no GID%s: %w", p.Number, fmt.Sprintf(format, args...),
			driver.ErrNoRoute)
	}
	if len(p.GIDs) == 0 {
		return GID{}, nil, none(": give its network device an address")
	}
	index := func(n int) int {
		return slices.IndexFunc(p.GIDs, func(g GID) bool { return g.Index == n })
	}
	best, missing, why := 0, none(" of RoCE"), func(*GID) string { return "" }
	switch {
	case override >= 0:
		best, missing = index(override), none(" of index %d, which Config.Devices names", override)
		why = func(*GID) string { return fmt.Sprintf("Config.Devices names index %d", override) }
	case !p.Ethernet():
		best, missing = index(0), none(" of index 0: is a subnet manager running?")
		why = func(*GID) string { return "InfiniBand: index 0 is the port's own" }
	default:
		for i := range p.GIDs {
			x, y := &p.GIDs[i], &p.GIDs[best]
			if cmp.Or(cmp.Compare(rankGID(x), rankGID(y)), cmp.Compare(family(x.Address),
				family(y.Address)), cmp.Compare(x.Index, y.Index)) < 0 {
				best = i
			}
		}
		chosen := &p.GIDs[best]
		why = func(g *GID) string { return explainRank(g, chosen) }
		if rankGID(chosen) == gidNone {
			best = -1
		}
	}
	choices := make([]GIDChoice, len(p.GIDs))
	for i := range p.GIDs {
		choices[i] = GIDChoice{GID: p.GIDs[i], Chosen: i == best, Why: why(&p.GIDs[i])}
	}
	if best < 0 {
		return GID{}, choices, missing
	}
	return p.GIDs[best], choices, nil
}

// explainRank returns why g was chosen, or why best was chosen and not g.
func explainRank(g, best *GID) string {
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

// family returns the IP version of an address, 4 or 6.
func family(a netip.Addr) int {
	if a.Unmap().Is4() {
		return 4
	}
	return 6
}

// pairing says which two rails a queue pair connects: indices of one of ours and one of the
// owner's.
type pairing struct{ ours, theirs int }

// match chooses the queue pairs to an owner. Each of our rails gets at most one queue pair, to an
// owner's rail in the same subnet; match spreads the queue pairs over the owner's rails. If no two
// rails share a subnet, match uses rails that a router may connect.
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

// better reports whether the owner's rail a suits our rail better than b: it has fewer queue pairs;
// else it is our rail itself (a connection within one host); else it has the same speed.
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

// routable reports whether two RoCE rails may reach each other although no common subnet is known:
// both have global addresses, which a router may connect, or both have link-local addresses, whose
// Ethernet segments may be the same one.
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

// nearest returns the rails closest to a NUMA node, one bit for each. It includes rails whose node
// is unknown, and all rails on a machine with one node.
func nearest(nodes topology.Nodes, rails []*rail, node int) (bits uint32) {
	least := 0
	far := make([]int, len(rails))
	for i, r := range rails {
		far[i] = nodes.Between(node, r.device.Node)
		if far[i] > 0 && (least == 0 || far[i] < least) {
			least = far[i]
		}
	}
	for i := range rails {
		if far[i] <= least {
			bits |= 1 << i
		}
	}
	return bits
}

// nearestTo returns the rails closest to a range of host memory, one bit for each. For device
// memory it returns all rails.
func (b *Backend) nearestTo(s *span) uint32 {
	node := -1
	if len(b.nodes) > 0 && len(b.rails) > 1 && s.device == onHost {
		if n, ok := nodeOf(s.bytes); ok {
			node = n
		}
	}
	return nearest(b.nodes, b.rails, node)
}
