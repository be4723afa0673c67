package target

import "strconv"

// requestState is where a request is. Only setState changes it.
//
//	free ─► received ─┬──────────────────────────────────────────┐
//	          │       ├─► waitBuffer ─┬─► waitRead ─► reading ─┐ │
//	          ▼       │               └────────────────────────┤ │
//	        parked ───┘                                        ▼ ▼
//	                                     event ◄─────────── executing
//	                                       │                   │
//	                                       └────► waitSend ◄───┤   (any state before executing
//	                                                 │         │    can be answered at once, too)
//	                                                 ▼         ▼
//	                              free ◄────────── responding ◄┘
//
// When the connection dies every state but executing goes to free at once;
// executing goes there when the back end has answered.
type requestState uint8

const (
	reqFree       requestState = iota
	reqReceived                // being looked at
	reqParked                  // arrived before the connection was reported established
	reqWaitBuffer              // waits for data buffer memory of the worker
	reqWaitRead                // has its buffer, waits for a read credit or send queue room
	reqReading                 // RDMA Read is outstanding
	reqExecuting               // with the back end or a handler
	reqEvent                   // an Asynchronous Event Request that waits for an event
	reqWaitSend                // done, waits for send queue room
	reqResponding              // response posted, not completed
	numRequestStates
)

var requestStateNames = [numRequestStates]string{"free", "received", "parked", "wait-buffer", "wait-read", "reading",
	"executing", "event", "wait-send", "responding"}

func (s requestState) String() string {
	if s < numRequestStates {
		return requestStateNames[s]
	}
	return "requestState(" + strconv.Itoa(int(s)) + ")"
}

// requestNext has a bit for every state that may follow.
var requestNext = [numRequestStates]uint16{
	reqFree:       1 << reqReceived,
	reqReceived:   1<<reqParked | 1<<reqWaitBuffer | 1<<reqWaitRead | 1<<reqReading | 1<<reqExecuting | 1<<reqWaitSend | 1<<reqResponding | 1<<reqFree,
	reqParked:     1<<reqReceived | 1<<reqFree,
	reqWaitBuffer: 1<<reqWaitRead | 1<<reqReading | 1<<reqExecuting | 1<<reqWaitSend | 1<<reqResponding | 1<<reqFree,
	reqWaitRead:   1<<reqReading | 1<<reqWaitSend | 1<<reqResponding | 1<<reqFree,
	reqReading:    1<<reqExecuting | 1<<reqFree,
	reqExecuting:  1<<reqEvent | 1<<reqWaitSend | 1<<reqResponding | 1<<reqFree,
	reqEvent:      1<<reqWaitSend | 1<<reqResponding | 1<<reqFree,
	reqWaitSend:   1<<reqResponding | 1<<reqFree,
	reqResponding: 1 << reqFree,
}

// queueState is where a queue pair is.
//
//	accepting ─► unconnected ─► connecting ─► live ─► draining ─► closing ─► closed
//	                   ▲             │          │
//	                   └─────────────┘          └───────────────► closing
//
// (every state can go to closing directly)
type queueState uint8

const (
	queueAccepting   queueState = iota // the connection is being established
	queueUnconnected                   // waits for a Connect command
	queueConnecting                    // a Connect is being worked on
	queueLive                          // belongs to a controller
	queueDraining                      // executes nothing new, answers what it has, then disconnects
	queueClosing                       // disconnected; the back end still has requests
	queueClosed                        // everything released
	numQueueStates
)

var queueStateNames = [numQueueStates]string{"accepting", "unconnected", "connecting", "live", "draining", "closing", "closed"}

func (s queueState) String() string {
	if s < numQueueStates {
		return queueStateNames[s]
	}
	return "queueState(" + strconv.Itoa(int(s)) + ")"
}

// controllerState is where an association is.
//
//	disabled ◄─► enabled ─► shutting-down ─► shut-down
//	    ▲   resetting ▲│                          │
//	    └──────┴───────┘     (all) ─► dying ─► gone
type controllerState uint8

const (
	ctrlDisabled     controllerState = iota // CC.EN is 0
	ctrlEnabled                             // CSTS.RDY is 1
	ctrlResetting                           // CC.EN went to 0, I/O queues are being torn down
	ctrlShuttingDown                        // CC.SHN was set, I/O queues are torn down and the back end is flushed
	ctrlShutDown                            // CSTS.SHST says complete
	ctrlDying                               // every queue is being torn down
	ctrlGone                                // nothing of it is left
	numControllerStates
)

var controllerStateNames = [numControllerStates]string{"disabled", "enabled", "resetting", "shutting-down", "shut-down", "dying", "gone"}

func (s controllerState) String() string {
	if s < numControllerStates {
		return controllerStateNames[s]
	}
	return "controllerState(" + strconv.Itoa(int(s)) + ")"
}
