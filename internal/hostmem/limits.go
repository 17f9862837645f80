// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Machine has the limits of host memory on this machine. A number is 0, and a string empty, if the
// kernel does not provide it.
type Machine struct {
	Total, Available uint64 // bytes, also within the cgroup of this process
	HugeReserved     uint64 // reserved huge pages of 2 MiB
	HugeFree         uint64 // of these, the pages that no mapping has or has reserved
	TransparentHuge  string // "always", "madvise" or "never"
	ShmemHuge        string // the same for memfds: also "advise", "within_size", "force", "deny"
	Nodes            []int  // NUMA nodes with memory, in order; empty without NUMA in the kernel
	Memlock          uint64 // bytes that may be locked; math.MaxUint64: any
	MapsMax          uint64 // mappings of one process
}

// Limits returns the limits of this machine.
func Limits() Machine { return LimitsAt("/") }

// LimitsAt is Limits with the files of proc and sys under another root than "/".
func LimitsAt(root string) Machine {
	var m Machine
	m.Total, m.Available = memoryLimits(root)
	m.HugeReserved = readUint(root, hugeDir, "nr_hugepages")
	m.HugeFree = freeHugePages(root)
	m.TransparentHuge = chosen(readText(root, transparentDir, "enabled"))
	m.ShmemHuge = chosen(readText(root, transparentDir, "shmem_enabled"))
	m.Nodes = parseList(readText(root, "sys/devices/system/node/has_memory"))
	m.Memlock = memlock(root)
	m.MapsMax = readUint(root, "proc/sys/vm/max_map_count")
	return m
}

const (
	hugeDir        = "sys/kernel/mm/hugepages/hugepages-2048kB"
	transparentDir = "sys/kernel/mm/transparent_hugepage"
	cgroupDir      = "sys/fs/cgroup"
)

// freeHugePages returns how many reserved huge pages can be allocated. Some free pages may be
// reserved for a mapping that has not touched them yet.
func freeHugePages(root string) uint64 {
	free := readUint(root, hugeDir, "free_hugepages")
	return free - min(free, readUint(root, hugeDir, "resv_hugepages"))
}

// memoryLimits returns the total and available bytes of the machine, or of the cgroup if that has
// less.
func memoryLimits(root string) (total, available uint64) {
	info := readText(root, "proc/meminfo")
	total, available = kibibytes(info, "MemTotal:"), kibibytes(info, "MemAvailable:")
	for _, h := range hierarchies {
		for dir := h.cgroup(root); ; dir = filepath.Dir(dir) {
			limit := readUint(root, cgroupDir, h.dir, dir, h.limit)
			if limit != 0 && limit < math.MaxInt64 { // "max" reads as 0
				used := readUint(root, cgroupDir, h.dir, dir, h.used)
				cache := field(readText(root, cgroupDir, h.dir, dir, "memory.stat"), h.cache)
				free := limit - min(limit, used-min(used, cache))
				total, available = min(total, limit), min(available, free)
			}
			if dir == "/" || dir == "." {
				break
			}
		}
	}
	return total, available
}

// hierarchy has the places of memory limits in one version of cgroups.
type hierarchy struct {
	mark        string // identifies the line of /proc/self/cgroup
	dir         string // below cgroupDir
	limit, used string // files of the cgroup
	cache       string // the field of memory.stat with the page cache, which can be reclaimed
}

var hierarchies = []hierarchy{
	{"0::", "", "memory.max", "memory.current", "inactive_file "},
	{":memory:", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
		"total_inactive_file "},
}

// cgroup returns the path of this process below the hierarchy.
func (h *hierarchy) cgroup(root string) string {
	for line := range strings.Lines(readText(root, "proc/self/cgroup")) {
		if _, path, ok := strings.Cut(line, h.mark); ok {
			return filepath.Clean("/" + strings.TrimSpace(path))
		}
	}
	return "/"
}

// memlock returns the soft limit of locked memory in bytes.
func memlock(root string) uint64 {
	for line := range strings.Lines(readText(root, "proc/self/limits")) {
		if rest, ok := strings.CutPrefix(line, "Max locked memory"); ok {
			soft, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
			if soft == "unlimited" {
				return math.MaxUint64
			}
			return parseUint(soft)
		}
	}
	return 0
}

// readText returns a small file, or "" if it cannot be read: a kernel may not have it.
func readText(path ...string) string {
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		return ""
	}
	return string(text)
}

func readUint(path ...string) uint64 { return parseUint(strings.TrimSpace(readText(path...))) }

func parseUint(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// field returns the first number after a name in a text.
func field(text, name string) uint64 {
	_, rest, ok := strings.Cut(text, name)
	if !ok {
		return 0
	}
	words := strings.Fields(rest)
	if len(words) == 0 {
		return 0
	}
	return parseUint(words[0])
}

func kibibytes(text, name string) uint64 { return field(text, name) << 10 }

// chosen returns the word in brackets of a text such as "always [madvise] never".
func chosen(text string) string {
	_, rest, _ := strings.Cut(text, "[")
	word, _, ok := strings.Cut(rest, "]")
	if !ok {
		return ""
	}
	return word
}

// parseList reads "0-2,5" as 0 1 2 5. Nonsense ends it, and so does a list that
// is longer than the kernel can have nodes.
func parseList(text string) []int {
	var list []int
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		if err1 != nil || err2 != nil || from < 0 || to >= nodesMax {
			break
		}
		for n := from; n <= to; n++ {
			list = append(list, n)
		}
	}
	return list
}
