// SPDX-License-Identifier: Apache-2.0

package bench

// The descriptors of a driver.
const (
	requestsFD = 3
	answersFD  = 4
)

// What a Request asks for, by Request.Do. All of it concerns the end that is asked.
const (
	// Lane, Role, Name, Bytes, FarBytes, Threads -> Version, Settings, Card
	DoOpen    = "open"
	DoConnect = "connect" // Card of the other end -> NS
	DoServe   = "serve"   // On: the other end works now; make progress if that is needed
	// Op, Size, Local, Remote: requests that will be posted in turn -> Bytes, of one operation,
	// where that is not what the request says
	DoPrepare = "prepare"
	DoOnce    = "once" // the first request, once -> NS
	// NS, Least, Threads: so many goroutines post requests in turn for so long -> Samples, Ops, NS
	DoGo     = "go"
	DoDrop   = "drop"   // give the requests back
	DoStamp  = "stamp"  // Size, Slots, Seed, Far: eight bytes at the front of each slot
	DoDigest = "digest" // Size, Slots, Far -> CRC of their content
	// On: all of the file into the page cache; else written back, and nothing of it there
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
	// of the target's memory, where the initiator holds both; Far asks about that memory
	FarBytes uint64 `json:"far_bytes,omitempty"`
	Far      bool   `json:"far,omitempty"`
	Card     string `json:"card,omitempty"`
	On       bool   `json:"on,omitempty"`
	Op       string `json:"op,omitempty"` // OpWrite, OpRead or OpDurable
	Size     uint64 `json:"size,omitempty"`
	// of each request the slots of its pieces, slots being Size bytes
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
	OpDurable = "durable" // a write that is done once the disk has it; of files alone
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
	Unsupported string `json:"unsupported,omitempty"` // the peer has nothing of the kind, and why
	Version     string `json:"version,omitempty"`
	Settings    string `json:"settings,omitempty"`
	Card        string `json:"card,omitempty"` // what the other end needs; opaque to the harness
	NS          int64  `json:"ns,omitempty"`
	// of one operation each; at most samplesMax of them
	Samples []int64 `json:"samples,omitempty"`
	Ops     int     `json:"ops,omitempty"`
	CRC     uint32  `json:"crc,omitempty"`
	Bytes   uint64  `json:"bytes,omitempty"`
	Text    string  `json:"text,omitempty"` // what is to be known of messages
}

// samplesMax bounds an answer: of more samples every second, third, ... is kept.
const samplesMax = 4096

// answerMax is how long a line from a driver may be; requests are ours.
const answerMax = 4 << 20
