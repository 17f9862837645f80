// SPDX-License-Identifier: Apache-2.0

package bench

// The file descriptors from which a driver reads requests, and to which it writes answers.
const (
	requestsFD = 3
	answersFD  = 4
)

// The values of Request.Do, with the fields of the request and, after the arrow, of the answer. All
// concern only the end that receives the request.
const (
	// Lane, Role, Name, Bytes, FarBytes, Threads -> Version, Settings, Card
	DoOpen    = "open"
	DoConnect = "connect" // Card of the other end -> NS
	DoServe   = "serve"   // On: the other end posts operations now; make progress if needed
	// Op, Size, Local, Remote: operations to post in turn -> Bytes of one operation, if they
	// differ from what the request says
	DoPrepare = "prepare"
	DoOnce    = "once" // post the first operation, once -> NS
	// NS, Least, Threads: so many goroutines post the operations in turn for NS -> Samples, Ops, NS
	DoGo     = "go"
	DoDrop   = "drop"   // forget the prepared operations
	DoStamp  = "stamp"  // Size, Slots, Seed, Far: write eight bytes at the start of each slot
	DoDigest = "digest" // Size, Slots, Far -> CRC of their content
	// On: read the whole file into the page cache; else write it back and drop it from there
	DoCache = "cache"
	DoPing  = "ping" // Count, Size: round trips -> Samples
	DoPong  = "pong" // Count, Size: answer them
)

// Request is one line to a driver.
type Request struct {
	ID    int    `json:"id"`
	Do    string `json:"do"`
	Lane  string `json:"lane,omitempty"`
	Role  string `json:"role,omitempty"` // RoleInitiator or RoleTarget
	Name  string `json:"name,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"` // of memory to register
	// size of the target's memory, if the initiator holds both; Far: the request is about that one
	FarBytes uint64 `json:"far_bytes,omitempty"`
	Far      bool   `json:"far,omitempty"`
	Card     string `json:"card,omitempty"`
	On       bool   `json:"on,omitempty"`
	Op       string `json:"op,omitempty"` // OpWrite, OpRead, OpDurable or OpMatch
	Size     uint64 `json:"size,omitempty"`
	// for each operation the slots of its pieces; a slot has Size bytes
	Local   [][]int32 `json:"local,omitempty"`
	Remote  [][]int32 `json:"remote,omitempty"`
	Slots   []int32   `json:"slots,omitempty"`
	Seed    uint64    `json:"seed,omitempty"`
	NS      int64     `json:"ns,omitempty"`
	Least   int       `json:"least,omitempty"`   // operations
	Threads int       `json:"threads,omitempty"` // goroutines that post; 0: 1
	Count   int       `json:"count,omitempty"`
}

// The operations, as the initiator sees them.
const (
	OpWrite   = "write"
	OpRead    = "read"
	OpDurable = "durable" // a write that completes once it is durable; only for files
	OpMatch   = "match"   // which of some keys a cache has; see Keyed
)

// The roles of an end.
const (
	RoleInitiator = "initiator"
	RoleTarget    = "target"
)

// Answer is one line from a driver. Times are nanoseconds.
type Answer struct {
	ID          int    `json:"id"`
	Error       string `json:"error,omitempty"`
	Unsupported string `json:"unsupported,omitempty"` // why the participant cannot do this
	Version     string `json:"version,omitempty"`
	Settings    string `json:"settings,omitempty"`
	Card        string `json:"card,omitempty"` // what the other end needs; opaque to the harness
	NS          int64  `json:"ns,omitempty"`
	// times of single operations; at most samplesMax
	Samples []int64 `json:"samples,omitempty"`
	Ops     int     `json:"ops,omitempty"`
	CRC     uint32  `json:"crc,omitempty"`
	Bytes   uint64  `json:"bytes,omitempty"`
	Text    string  `json:"text,omitempty"` // remark on what was posted, or on how messages are sent
}

// samplesMax bounds the samples of an answer: of more, a driver keeps every second, third, and so
// on.
const samplesMax = 4096

// answerMax is how long a line from a driver may be.
const answerMax = 4 << 20
